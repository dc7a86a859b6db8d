"""Convolutions as a compiler calls them on a GPU: without their bias, which the next kernel adds."""

from __future__ import annotations

import re
from dataclasses import replace

from convmesh.plans.steps import Work

_WITH_BIAS = re.compile(
    r"^(convolution\.default\(\w+\([^()]*(?:\([^()]*\))?\), \w+\([^()]*(?:\([^()]*\))?\), )\w+\(\d+\)"
)


def without_bias(work: Work) -> Work:
    """The same convolution without a bias; other work as it is."""
    if work.op != "convolution":
        return work
    call, replaced = _WITH_BIAS.subn(r"\1None", work.call)
    return replace(work, inputs=work.inputs[:2], call=call) if replaced else work
