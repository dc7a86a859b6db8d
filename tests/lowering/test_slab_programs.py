"""Programs of volumes that are computed in slabs say so: what a plan lists is what a GPU computes."""

import math

import pytest
from torch import nn

import convmesh as cm
from convmesh.plans import Work

VOLUME = 512, 512, 512


def listed(plan: cm.Plan, op: str) -> list[Work]:
    return [work for work in cm.lower_plan(plan, device="cuda").program.works() if work.op == op]


@pytest.mark.parametrize(("kernel", "slabs"), [(1, 4), (3, 6)])
def test_slabs_of_a_large_sample_are_listed(kernel: int, slabs: int) -> None:
    """16 filters of 512³ are 2^31 elements: four slabs, and with padding two thin ones."""
    model = nn.Sequential(nn.Conv3d(4, 16, kernel, padding=kernel // 2), nn.Conv3d(16, 16, kernel, padding=kernel // 2))
    plan = cm.plan(model, (1, 4, *VOLUME), cm.Mesh(), "data")
    forward, backward = listed(plan, "convolution"), listed(plan, "convolution_backward")
    assert len(forward) == 2 * slabs
    assert sum(work.flops for work in forward) == 2 * (4 + 16) * 16 * kernel**3 * math.prod(VOLUME)
    assert len(backward) == 2 * slabs + 4, "of both weights, and of the second layer's input in four slabs"


def test_parts_of_ranks_that_are_small_enough_stay_whole() -> None:
    plan = cm.plan(nn.Conv3d(4, 16, 3, padding=1), (1, 4, *VOLUME), cm.Mesh(depth=2), "spatial")
    own, halo = listed(plan, "convolution")
    assert own.outputs == ((1, 16, 256, 512, 512),)
    assert own.flops > halo.flops
