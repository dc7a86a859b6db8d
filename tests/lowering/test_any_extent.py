"""Dry runs for any number of samples or channels: programs from them are those of dry runs for the very number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from convmesh import Mesh
from convmesh.graph import capture
from convmesh.lowering import dry_run
from convmesh.lowering.any_extent import APART, MANY, Extent, for_extent, has_gaps
from convmesh.lowering.dry_values import DryResult
from convmesh.lowering.lower import lower
from convmesh.lowering.lowering_cache import share_dry_runs
from convmesh.lowering.samples_apart import SamplesApart
from convmesh.planner.drafting import DraftOptions, draft
from convmesh.plans import Program, Transfer, Work


class Net(nn.Module):
    """Layers of every kind that counts samples: halos, strides, groups, pools, sums, joins, dense layers."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.mean = nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = x + self.grouped(x)
        y = self.up(torch.cat([self.mean(x), self.mean(x)], 1))
        out: torch.Tensor = self.head(y)
        return out


def lowered(net: nn.Module, samples: int, mesh: Mesh, strategy: str) -> Program:
    captured = capture(net, (samples, 3, 64, 64), check=False)
    return lower(captured, draft(captured, mesh, strategy, DraftOptions()), mesh.size - 1).program


MESHES = [
    (Mesh(), "data"),
    (Mesh(data=2), "data"),
    (Mesh(data=3), "data"),
    (Mesh(height=2, width=2), "spatial"),
    (Mesh(data=2, height=4), "data+spatial"),
    (Mesh(filter=4), "filter"),
    (Mesh(data=2, channel=2), "data+channel"),
    (Mesh(data=2), "hybrid"),
]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize("samples", [6, 14])
def test_programs_are_those_for_the_very_number(
    mesh: Mesh, strategy: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(norm=strategy != "filter")
    counted = lowered(net, samples, mesh, strategy)
    with monkeypatch.context() as patched:
        patched.setattr(SamplesApart, "in_any_number", lambda *_: None)
        direct = lowered(net, samples, mesh, strategy)
    assert counted == direct


def test_batches_of_other_sizes_share_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    net, runs = Net(), list[Any]()
    first = capture(net, (4, 3, 64, 64), check=False)
    other = capture(net, (10, 3, 64, 64), check=False)
    share_dry_runs(first, other)
    real = dry_run._run

    def counted(*args: Any) -> DryResult:
        runs.append(args)
        return real(*args)

    monkeypatch.setattr(dry_run, "_run", counted)
    counts = []
    for captured in (first, other):
        lower(captured, draft(captured, Mesh(data=2), "data", DraftOptions()))
        counts.append(len(runs))
    assert counts[0] > 10
    assert counts[1] - counts[0] <= 2  # the batch's norm, and what makes vectors of planes


class Dense(nn.Module):
    """Norms of many widths over planes of three sizes, and convolutions whose gradients are parts of larger ones."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 3 * at, affine=affine) for at in range(5))
        self.layers = nn.ModuleList(nn.Conv2d(4 + 3 * at, 3, 3, padding=1) for at in range(5))
        self.pool = nn.AvgPool2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for at, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = torch.cat([x, layer(norm(x))], 1)
            x = self.pool(x) if at % 2 else x
        return x


def runs_of(monkeypatch: pytest.MonkeyPatch, lowering: Callable[[], Program]) -> tuple[Program, int]:
    """A program, and how many dry runs it took."""
    runs, real = list[Any](), dry_run._run

    def counted(*args: Any) -> DryResult:
        runs.append(args)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(dry_run, "_run", counted)
        return lowering(), len(runs)


@pytest.mark.parametrize("layout", ["plain", "channels last", "evaluating", "without weights"])
@pytest.mark.parametrize(("mesh", "strategy"), [*MESHES[:2], *MESHES[3:6], (Mesh(data=6, width=2), "data+spatial")])
def test_norms_and_gaps_are_those_of_the_very_number(
    mesh: Mesh, strategy: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Dense(affine=layout != "without weights").train(layout != "evaluating")
    if layout == "channels last":
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    many, few = runs_of(monkeypatch, lambda: lowered(net, 18, mesh, strategy))
    with monkeypatch.context() as patched:
        patched.setattr(dry_run, "any_channels", lambda *_: None)
        patched.setattr(dry_run, "has_gaps", lambda *_: False)
        direct, runs = runs_of(monkeypatch, lambda: lowered(net, 18, mesh, strategy))
    assert many == direct
    assert few < runs or "filter" in mesh.axes


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm3d(3)])
def test_large_channels_that_are_cut_in_pieces_are_not_counted(
    norm: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (2, 3, 65536) if isinstance(norm, nn.BatchNorm1d) else (2, 3, 64, 64, 16)

    def program() -> Program:
        captured = capture(nn.Sequential(norm), shape, check=False)
        return lower(captured, draft(captured, Mesh(data=2), "data", DraftOptions())).program

    found = program()
    monkeypatch.setattr(dry_run, "any_channels", lambda *_: None)
    assert found == program()
    assert any("float32(1, 192" in step.call for step in found.nodes[1].forward if isinstance(step, Work))


def test_shares_of_sums_are_found_again() -> None:
    for ranks in (2, 3, 7, 64):
        sent = Transfer("all_reduce", ("data",), 2 * (ranks - 1) * (8 * MANY + 4) // ranks)
        result = DryResult(None, (sent,), (), (), (), moments=((0,),) * 3)
        counted = for_extent(result, Extent(1, 5), Mesh(data=ranks))
        assert counted.forward == (Transfer("all_reduce", ("data",), 2 * (ranks - 1) * 44 // ranks),)


def test_gaps_lie_between_samples() -> None:
    assert has_gaps((4, 3, 2), (7, 2, 1))
    assert not has_gaps((4, 3, 2), (6, 2, 1))
    assert not has_gaps((4, 3, 2), (1, 8, 4))


def test_memory_with_gaps_is_not_counted() -> None:
    held = DryResult(None, (), (), (), (), moments=((4 * APART * MANY,), (0,), (0,)))
    with pytest.raises(ValueError, match="gaps"):
        for_extent(held, Extent(0, 2, 99), Mesh())


def test_bytes_that_were_rounded_are_not_counted() -> None:
    result = DryResult(None, (Transfer("all_gather", ("data",), MANY * 3 // 4),), (), (), (), moments=((0,),) * 3)
    with pytest.raises(ValueError, match="rounded"):
        for_extent(result, Extent(0, 2), Mesh(data=2))


def test_a_number_that_is_no_whole_one_is_not_counted() -> None:
    work = Work("mul", ((MANY, 2),), ((MANY, 2),), "float32", 0, 16 * MANY, (1.0 / MANY,), f"mul({MANY}.0)")
    with pytest.raises(ValueError, match="part of another"):
        for_extent(DryResult(None, (work,), (), (), (), moments=((0,),) * 3), Extent(0, 2), Mesh())


def test_constants_and_multiples_are_told_apart() -> None:
    work = Work("conv", ((MANY, 2), (5,)), ((MANY, 3),), "float32", 7 * MANY - 12, 3 * MANY + 400, (MANY, True), "")
    counted = for_extent(
        DryResult(None, (work,), (), (), (), moments=((2 * MANY, 900), (0,), (0,))), Extent(0, 10), Mesh()
    )
    assert counted.forward == (Work("conv", ((10, 2), (5,)), ((10, 3),), "float32", 58, 430, (10, True), ""),)
    assert counted.held.bytes_forward == 900  # with many samples another moment is the peak
