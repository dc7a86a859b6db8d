"""Dry runs for any number of channels: few of them serve many layers, and none serves a layer that it is not like."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from convmesh import Mesh
from convmesh.dist import dry_mesh
from convmesh.graph import capture
from convmesh.layout import Layout
from convmesh.lowering import dry_run
from convmesh.lowering.any_channels import any_channels
from convmesh.lowering.dry_call import ArrangeCall
from convmesh.lowering.dry_run import DryRunner
from convmesh.lowering.dry_values import Dry, DryResult
from convmesh.lowering.lower import lower
from convmesh.lowering.node_calls import FunctionCall, ModuleCall, module_key
from convmesh.planner.drafting import DraftOptions, draft
from convmesh.plans import Program
from tests.lowering.test_any_extent import runs_of

MESHES = [(Mesh(), "data"), (Mesh(height=2, width=2), "spatial"), (Mesh(data=2, height=2), "data+spatial")]


class Joined(nn.Module):
    """Blocks that each add some channels to those before them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        widths = [4 + 3 * at for at in range(blocks)]
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.mixing = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in widths)
        self.growing = nn.ModuleList(nn.Conv2d(width, 3, 3, padding=1, bias=False) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for mix, grow in zip(self.mixing, self.growing, strict=True):
            y = torch.relu(x)
            x = torch.cat([x, grow(y) * mix(y)[:, :3]], 1)
        return x


def lowered(net: nn.Module, mesh: Mesh, strategy: str) -> Program:
    captured = capture(net, (8, 3, 32, 32), check=False)
    return lower(captured, draft(captured, mesh, strategy, DraftOptions()), mesh.size - 1).program


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_more_widths_take_hardly_more_runs(mesh: Mesh, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (runs_of(monkeypatch, partial(lowered, Joined(blocks), mesh, strategy))[1] for blocks in (4, 8))
    with monkeypatch.context() as patched:
        patched.setattr(dry_run, "any_channels", lambda *_: None)
        singly = runs_of(monkeypatch, partial(lowered, Joined(8), mesh, strategy))[1]
    assert many - few <= 4  # the gradients of four more joins lie in memory in ways of their own
    assert singly - many >= 16


class Similar(nn.Module):
    """Layers on planes of one size, each of which differs from another in one thing besides its channels."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(4, 6, 3), nn.Conv2d(5, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(7, 8, 3), nn.Conv2d(8, 6, 5),
            nn.Conv2d(9, 6, 3, stride=2), nn.Conv2d(10, 6, 3, padding=1), nn.Conv2d(11, 6, 3, dilation=2),
            nn.Conv2d(12, 6, 3, bias=False), nn.Conv2d(12, 6, 3, groups=2), nn.Conv2d(13, 13, 3, groups=13),
            nn.Conv2d(14, 6, (3, 1)), nn.Conv2d(15, 6, 3, padding=1, padding_mode="circular"), nn.Conv2d(1, 6, 3),
            nn.ConvTranspose2d(9, 6, 3), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, stride=2),
            nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Conv2d(16, 6, 3).requires_grad_(False),
        ]  # fmt: skip
        self.widening = nn.ModuleList(nn.Conv2d(3, _channels(layer, at), 1) for at, layer in enumerate(layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        for widen, layer in zip(self.widening, self.layers, strict=True):
            wide = widen(x)
            total = total + layer(wide).sum() + torch.cat([wide, wide], 2).sum() + torch.cat([wide, x], 1).sum()
        return total


def _channels(layer: nn.Module, at: int) -> int:
    return int(getattr(layer, "in_channels", 2 + at))


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_layers_that_differ_share_nothing(mesh: Mesh, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = lowered(Similar(), mesh, strategy)
    monkeypatch.setattr(dry_run, "any_channels", lambda *_: None)
    assert shared == lowered(Similar(), mesh, strategy)


def test_changes_of_layout_are_those_of_the_very_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(data=2, height=2)
    found = [_arranged(DryRunner(dry_mesh(mesh, 3)), channels) for channels in (5, 6, 9)]
    shared = DryRunner(dry_mesh(mesh, 3))
    again = [_arranged(shared, channels) for channels in (5, 6, 9)]
    monkeypatch.setattr(dry_run, "any_channels", lambda *_: None)
    assert found == again == [_arranged(DryRunner(dry_mesh(mesh, 3)), channels) for channels in (5, 6, 9)]


def _arranged(runner: DryRunner, channels: int) -> DryResult:
    """From samples and rows to samples alone."""
    mesh, shape = runner.mesh.mesh, (8, channels, 6, 4)
    given = Dry(Layout.of(mesh, shape, {0: "data", 2: "height"}), torch.float32, True)
    wanted = Layout.of(mesh, shape, {0: ("data", "height")})
    return runner.run(ArrangeCall(wanted.cuts), ((given,), {}))


def test_what_is_large_besides_channels_is_not_counted() -> None:
    """Its bytes could not be told from those of channels."""
    for filters, is_counted in ((64, True), (2048, False)):
        module = nn.Conv2d(3, filters, 1)
        call = ModuleCall("layer", module, module_key(module), None, False, False, None)
        x = Dry(Layout.of(Mesh(), (32, 3, 64, 64)), torch.float32, True)
        assert (any_channels(call, [x], dry_mesh(Mesh(), 0)) is not None) == is_counted


@pytest.mark.parametrize(("dim", "is_counted"), [(1, True), (2, False), (0, False)])
def test_only_what_is_joined_along_channels_has_channels_of_its_own(dim: int, is_counted: bool) -> None:
    x, y = (Dry(Layout.of(Mesh(), (2, channels, 8, 8)), torch.float32, True) for channels in (3, 4))
    found = any_channels(FunctionCall("call_function", torch.cat, None, False), [x, y, dim], dry_mesh(Mesh(), 0))
    assert (found is not None) == is_counted
    if found is not None:
        assert found.channels == 3
        assert found.leaves[1] is y


def test_processors_look_at_channels_one_by_one() -> None:
    x = Dry(Layout.of(Mesh(), (2, 4, 8, 8)), torch.float32, True)
    call = ModuleCall("layer", nn.ReLU(), module_key(nn.ReLU()), None, False, False, None)
    assert any_channels(call, [x], dry_mesh(Mesh(), 0, "cuda")) is not None
    assert any_channels(call, [x], dry_mesh(Mesh(), 0, "cpu")) is None
