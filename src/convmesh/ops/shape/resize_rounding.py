"""How torch's kernels round the positions of resized images: builds of torch differ."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from convmesh.layout.box import Span
from convmesh.layout.resize import Arithmetic, Resized, step_of
from convmesh.ops.core.device_constants import lasting

EXTENT, OUT = 1021, 1531
"""A resize whose positions distinguish one rounding from two."""


@cache
def linear_arithmetic() -> Arithmetic:
    """Float32's on this CPU: most builds multiply and add with one rounding, some, such as torch 2.15's, with two."""
    with lasting(), torch.no_grad():
        zeros_and_ones = (torch.arange(EXTENT) % 2).float().view(1, 1, -1)  # give the weight of one tap, unrounded
        from_torch = F.interpolate(zeros_and_ones, size=OUT, mode="linear").flatten().numpy()
    resized = Resized("linear", OUT, step_of(EXTENT, OUT, None, False, "single"), arithmetic="single")
    indices, weights = resized.taps(Span(0, OUT), EXTENT)
    assert weights is not None
    return "single" if np.array_equal((weights * (indices % 2)).sum(0), from_torch) else "fused"
