"""Parses shapes typed as `1x64x64x64`."""

from __future__ import annotations

import re

from convmesh.cli.exits import BadInputError


def parse_shape(argument: str, text: str) -> tuple[int, ...]:
    """One sample's shape without its batch dim: channels, then space."""
    if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*)*", text.strip()):
        raise BadInputError(
            f"`{argument}` (={text!r}) must be one sample's shape without the batch: channels, then space, such as "
            "1x64x64x64."
        )
    return tuple(int(part) for part in re.split("[x×]", text.strip()))
