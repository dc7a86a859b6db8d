"""The torch releases on which the whole test suite passes."""

from __future__ import annotations

import os
import warnings

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
"""Major and minor version, both included. pyproject.toml pins the same range; continuous integration runs both ends."""


def warn_if_untested() -> None:
    """Warn once, from the first rank of a job only, if this torch was not tested."""
    version = tuple(int(part) for part in str(torch.__version__).split(".")[:2])
    if OLDEST <= version <= NEWEST or os.environ.get("RANK", "0") != "0":
        return
    message = (
        f"ConvMesh was tested with torch {_written(OLDEST)} to {_written(NEWEST)}; this is torch {torch.__version__}. "
        "Run `convmesh verify MODEL --ranks 4` before you trust its gradients."
    )
    warnings.warn(message, UserWarning, stacklevel=2)


def _written(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
