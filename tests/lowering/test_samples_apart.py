"""A call that treats samples one by one finds, from its own samples, what it finds from the whole batch."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import ConvMeshError
from convmesh.graph import capture
from convmesh.lowering import dry_run, lower
from convmesh.plans import Program
from tests.draws import draws


class Branches(nn.Module):
    """Every kind of layer that looks at samples one by one, and some that do not."""

    def __init__(self, width: int, kernel: int, stride: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, kernel, stride, kernel // 2)
        self.norm = nn.BatchNorm2d(width)
        self.deep = nn.Conv2d(width, width, 3, padding=1, groups=groups)
        self.thin = nn.Conv2d(width, width, 1, bias=False)
        self.most = nn.MaxPool2d(3, 2, 1)
        self.mean = nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.group = nn.GroupNorm(1, width)
        self.mixed = nn.Linear(width, width)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.flat = nn.Flatten()
        self.head = nn.Linear(4 * width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.cat([self.most(self.deep(x)), self.mean(self.thin(x))], 1)
        x = nn.functional.gelu(self.up(x)) * 2
        x = x + self.mixed(self.group(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: torch.Tensor = self.head(self.flat(self.pool(self.grow(x))))
        return out


@st.composite
def networks(draw: st.DrawFn) -> Branches:
    with torch.device("meta"):
        return Branches(*(draw(st.sampled_from(sizes)) for sizes in ((4, 8), (1, 3, 7), (1, 2), (1, 2))))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[cm.Mesh, str]:
    """A mesh whose samples are cut, and a strategy for it."""
    data = draw(st.sampled_from([2, 3, 4]))
    kind = draw(st.sampled_from(["data", "data+spatial", "data+filter", "data+channel", "data+pipeline", "hybrid"]))
    more = {
        "data+spatial": {"height": draw(st.sampled_from([2, 3])), "width": draw(st.sampled_from([1, 2]))},
        "data+filter": {"filter": 2},
        "data+channel": {"channel": 2},
        "data+pipeline": {"pipe": 2},
    }
    return cm.Mesh(data=data, **more.get(kind, {})), kind


def lowered(model: nn.Module, shape: tuple[int, ...], mesh: cm.Mesh, strategy: str, rank: int) -> Program | str:
    captured = capture(model, shape, check=False)
    try:
        return lower(captured, cm.plan(captured, shape, mesh, strategy), rank).program
    except ConvMeshError as error:
        return str(error)


@draws(40)
@given(networks(), meshes(), st.integers(4, 13), st.sampled_from([16, 24, 28]), st.booleans(), st.data())
def test_own_samples_give_what_the_batch_gives(
    model: nn.Module, on: tuple[cm.Mesh, str], batch: int, extent: int, channels_last: bool, draw: st.DataObject
) -> None:
    mesh, strategy = on
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rank = draw.draw(st.integers(0, mesh.size - 1))
    shape = (batch, 3, extent, extent)
    shared = lowered(model, shape, mesh, strategy, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "samples_apart", lambda *_: None)
        assert lowered(model, shape, mesh, strategy, rank) == shared


class Heads(nn.Module):
    """A projection whose result is cut into heads and put together again, and windows that move samples."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Any) -> Any:
        one, other, last = self.project(x).unflatten(-1, (3, 4, 2)).unbind(2)
        y = (one + other * last).transpose(1, 2).permute((0, 2, 1, 3)).flatten(2)
        moved = y.transpose(0, 1).flatten(0, 1).unflatten(0, (x.shape[1], -1)).permute(1, 0, 2)
        return torch.relu(y + moved).flatten(1).unbind(1)[0]


@pytest.mark.parametrize("batch", [4, 8, 13])
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=4), Mesh(data=2, filter=2)], ids=str)
def test_methods_behind_the_first_dim_need_no_other_samples(mesh: Mesh, batch: int) -> None:
    model, shape = Heads(), (batch, 4, 8)
    strategy = "data+filter" if mesh.extent(("filter",)) > 1 else "data"
    for rank in range(mesh.size):
        shared = lowered(model, shape, mesh, strategy, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, "samples_apart", lambda *_: None)
            assert lowered(model, shape, mesh, strategy, rank) == shared


def test_meshes_and_batches_with_as_many_samples_a_rank_share_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[tuple[int, ...]] = Counter()
    run = dry_run._run

    def counted(mesh: cm.OpenMesh, ready: object, leaves: list[object], *args: object) -> object:
        runs[tuple(mesh.mesh.axes.values())] += 1
        return run(mesh, ready, leaves, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run, "_run", counted)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    captured = capture(model, (8, 2, 8, 8), check=False)
    cm.plan(captured, (8, 2, 8, 8), cm.Mesh(data=2), "data")
    assert runs
    for mesh, samples in ((cm.Mesh(data=4), 16), (cm.Mesh(data=2, filter=2), 8)):
        other = cm.plan(captured, (8, 2, 8, 8), mesh, {"*": {"sample": "data"}})
        runs.clear()
        lower(captured, other, samples=samples)
        assert not runs


class Joined(nn.Module):
    """A tensor with all channels, then one of which ranks have parts, and a norm behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.cut, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(torch.cat([self.whole(x), self.cut(x)], 1))


def test_what_is_joined_lies_as_planned_where_samples_are_cut_too() -> None:
    model, shape, mesh = Joined(), (4, 3, 4, 4), Mesh(data=2, filter=2)
    splits = {"*": {"sample": "data"}, "cut": {"sample": "data", "channel": "filter"}}
    verified = cm.verify(model, shape, cm.plan(model, shape, mesh, splits), steps=1)
    assert verified.ok, str(verified)
