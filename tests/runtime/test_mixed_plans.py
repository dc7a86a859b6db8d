"""Any legal plan trains identically: splits drawn layer by layer."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh, Split
from convmesh.graph import capture
from convmesh.plans import split_nodes
from tests.conftest import Pools
from tests.draws import draws


class Mixed(nn.Module):
    """A bit of everything that a plan can split: strides, groups, norms, transposed layers, skips, dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2)
        self.pool = nn.MaxPool2d(2)
        self.group = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.mix = nn.Conv2d(16, 6, 3, padding=1)
        self.hidden, self.head = nn.Linear(6 * 16, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.norm(self.enter(x)))
        b = self.down(a)
        c = self.up(self.group(self.pool(b)))
        d = F.relu(self.mix(torch.cat([b, c], 1)))
        d = F.adaptive_avg_pool2d(d, 4)
        result: torch.Tensor = self.head(F.relu(self.hidden(d.flatten(1))))
        return result


SHAPE = (4, 3, 16, 12)
CHANNEL_LAYERS = ("enter", "up", "mix", "hidden", "head")
MESHES = [Mesh(data=2), Mesh(height=2, width=2), Mesh(data=2, channel=2), Mesh(channel=2, filter=2), Mesh(data=3)]


@functools.cache
def layers() -> list[str]:
    return list(dict.fromkeys(node.layer for node in split_nodes(capture(Mixed(), SHAPE).graph)))


@st.composite
def splits(draw: st.DrawFn, mesh: Mesh, layer: str) -> Split:
    """Any way to give each axis of the mesh one dim of the layer, or none."""
    chosen: dict[str, tuple[str, ...]] = {}
    dims = ["sample"] + (["height", "width"] if layer not in ("hidden", "head") else [])
    dims += ["channel"] if layer in CHANNEL_LAYERS else []
    for axis in mesh.axes:
        dim = draw(st.sampled_from([*dims, None]))
        if dim is not None:
            chosen[dim] = (*chosen.get(dim, ()), axis)
    algorithm = draw(st.sampled_from(["auto", "x", "y"]))
    ranks = mesh.extent(chosen.get("channel", ()))
    if ranks > 5:
        del chosen["channel"]
    elif ranks > SHAPE[1] and layer == "enter" and algorithm == "x":
        algorithm = "y"  # x cuts the input's channels, of which there are too few
    return Split(**chosen, algorithm=algorithm)  # type: ignore[arg-type]


def train(plan_of: dict[str, Split] | None, mesh: Mesh | None) -> list[Any]:
    torch.manual_seed(0)
    model = Mixed().double()
    x, target = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 3, 1, 4])
    net: Any = model
    if mesh is not None and plan_of is not None:
        net = cm.parallelize(model, cm.plan(model, x, mesh, plan_of), loss=F.cross_entropy)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), target) if mesh is None else net(net.shard_input(x), net.shard_target(target))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return [losses, model.state_dict() if mesh is None else net.full_state_dict()]


@pytest.fixture(scope="module")
def whole(pools: Pools) -> list[Any]:
    (found,) = pools[1].run(train, None, None)
    return list(found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@draws(10)
@given(data=st.data())
def test_any_plan_trains_as_one_process(pools: Pools, whole: list[Any], mesh: Mesh, data: st.DataObject) -> None:
    plan_of = {layer: data.draw(splits(mesh, layer), label=layer) for layer in layers()}
    for found in pools[mesh.size].run(train, plan_of, mesh):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)
