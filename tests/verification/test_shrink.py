"""Smaller meshes and shapes: as small as allowed, never with other cuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh.plans import Pipeline, Split, split_nodes
from convmesh.verification.shrink import Shrinker, on_mesh, smaller_mesh
from tests.verification.small_networks import Chain


@given(
    st.dictionaries(st.sampled_from(["data", "depth", "height", "filter"]), st.integers(1, 4096)), st.integers(1, 64)
)
def test_a_smaller_mesh_fits_and_keeps_its_axes_while_it_can(axes: dict[str, int], most: int) -> None:
    mesh = cm.Mesh(**axes)
    small = smaller_mesh(mesh, most)
    assert small.size <= most
    assert all(size <= mesh.axes[name] for name, size in small.axes.items())
    if 2 ** len(mesh.axes) <= most:
        assert small.axes.keys() == mesh.axes.keys()
    if mesh.size <= most:
        assert small == mesh


def test_a_plan_on_fewer_axes_drops_algorithms_that_need_them() -> None:
    splits = (("a", Split(sample=("data",), channel=("channel", "filter"), algorithm="w")),)
    plan = cm.Plan(mesh=cm.Mesh(data=4, channel=2, filter=2), splits=splits)
    small = on_mesh(plan, cm.Mesh(data=2, filter=2))
    assert small.split("a") == Split(sample=("data",), channel=("filter",), algorithm="auto")


@pytest.mark.parametrize(("pipe", "starts"), [(2, ("c",)), (4, ("b", "c", "d")), (1, None)])
def test_a_shorter_pipeline_has_fewer_stages(pipe: int, starts: tuple[str, ...] | None) -> None:
    stages = ("b", "c", "d") if pipe == 4 else ("a", "b", "c", "d", "e")
    was = 4 if pipe == 4 else 6
    plan = cm.Plan(mesh=cm.Mesh(pipe=was), splits=(), pipeline=Pipeline(starts=stages))
    small = on_mesh(plan, cm.Mesh(pipe=pipe)).pipeline
    assert (small.starts if small else None) == starts


@given(st.integers(1, 32), st.integers(4, 300), st.integers(4, 300), st.integers(1, 4), st.integers(1, 4))
def test_every_layer_keeps_its_cuts(batch: int, height: int, width: int, rows: int, columns: int) -> None:
    model, shape = Chain(), (batch, 3, height, width)
    plan = cm.plan(model.double(), shape, cm.Mesh(height=rows, width=columns), "spatial")
    shrinker = Shrinker(model, (shape,), plan, plan.source)
    shrinker.run()
    assert all(a <= b for a, b in zip(shrinker.shapes[0], shape, strict=True))
    pairs = list(zip(split_nodes(shrinker.captured.graph), split_nodes(plan.source.graph), strict=True))
    for small, large in pairs:
        for dim, axes in plan.split(small.layer).cut(4).items():
            assert small.outputs[0].shape[dim] >= min(plan.mesh.extent(axes), large.outputs[0].shape[dim])
    norm, before = pairs[-1]
    assert norm.outputs[0].elements >= min(6 * 16, before.outputs[0].elements)


def test_a_network_that_asks_for_its_extents_keeps_them() -> None:
    """Halves of 96 are cut by this U-shaped network until they are odd."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(16, 32, 2, stride=2)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.up(self.down(x))], 1)

    model, shape = Up().double(), (1, 16, 96, 1000)
    plan = cm.plan(model, shape, cm.Mesh(width=2), "spatial")
    shrinker = Shrinker(model, (shape,), plan, plan.source)
    shrinker.run()
    _, _, height, width = shrinker.shapes[0]
    assert height % 2 == 0
    assert width % 2 == 0
    assert (height, width) < (96, 1000)
