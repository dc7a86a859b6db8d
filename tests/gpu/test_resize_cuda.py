"""Interpolation on a GPU: torch's CUDA kernels round differently from its CPU kernels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convmesh import Mesh, open_mesh, shard
from convmesh.testing import SplitCase
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

SCALES = (0.3, 1 / 3, 0.61, 1.05, 1.3, 1.9, 2.0, 2.1, 41.0)


def resized(x: Any, **options: Any) -> Any:
    return F.interpolate(x, **options)


def nearest_everywhere() -> list[tuple[Any, ...]]:
    """All cases in which resizing a split row differs from resizing the whole row."""
    mesh = open_mesh(Mesh(width=2), device="cuda")
    wrong = []
    for dtype in (torch.float32, torch.float64):
        for extent in (2, 3, 5, 10, 41, 97, 500):
            row = torch.arange(extent, dtype=dtype, device="cuda").view(1, 1, -1)
            for options in [{"size": out} for out in (1, 7, 41, 55, 82, 97, 110, 999)] + [
                {"scale_factor": scale} for scale in SCALES if int(extent * scale)
            ]:
                for dims in (1, 2, 3):
                    whole = row.view(1, 1, *[1] * (dims - 1), extent)
                    x: Any = shard(whole, mesh, {dims + 1: "width"})
                    one: Any = {k: (1,) * (dims - 1) + (v,) for k, v in options.items()}
                    for mode in ("nearest", "nearest-exact"):
                        found, expected = (resized(each, mode=mode, **one) for each in (x, whole))
                        if not torch.equal(found.gather(), expected):
                            wrong.append((dtype, extent, dims, mode, options))
    return wrong


def test_nearest_indices_are_those_of_cuda(ranks: Ranks) -> None:
    assert ranks(2).run(nearest_everywhere) == [[], []]


CASES = [
    SplitCase(partial(resized, **options), mesh, (shape,), dtype=dtype, device="cuda")
    for dtype in (torch.float32, torch.float64)
    for mesh, shape, options in (
        (Mesh(width=2), (2, 3, 1021), {"size": 1531, "mode": "linear"}),
        (Mesh(height=2), (1, 2, 1021, 3), {"scale_factor": 1.3, "mode": "bilinear"}),
        (Mesh(height=2, width=2), (1, 2, 9, 11), {"scale_factor": (1.05, 2.3), "mode": "bilinear"}),
        (Mesh(height=2, width=2), (1, 2, 9, 11), {"scale_factor": 1.05, "mode": "bicubic"}),
        (Mesh(height=2, width=2), (1, 2, 9, 11), {"size": (13, 7), "mode": "bicubic", "align_corners": True}),
        (Mesh(depth=3), (2, 2, 7, 5, 4), {"scale_factor": 2, "mode": "trilinear"}),
        (Mesh(depth=3), (2, 2, 7, 5, 4), {"size": (9, 3, 11), "mode": "trilinear", "align_corners": True}),
        (Mesh(depth=2, width=2), (2, 2, 7, 5, 4), {"scale_factor": 2, "mode": "nearest"}),
        (Mesh(depth=2, width=2), (2, 2, 7, 5, 4), {"size": (9, 3, 11), "mode": "nearest-exact"}),
    )
]


def check_all(cases: list[SplitCase]) -> None:
    for case in cases:
        try:
            case.check()
        except AssertionError as error:
            raise AssertionError(f"{case.mesh} {case.inputs} {case.fn.keywords} {case.dtype}: {error}") from error  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_resizing(count: int, ranks: Ranks) -> None:
    ranks(count).run(check_all, [case for case in CASES if case.mesh.size == count])
