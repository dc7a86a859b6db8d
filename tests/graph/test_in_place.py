"""Changes in place during a trace: captured where split tensors can follow, closed where they cannot."""

from typing import Any

import pytest
import torch
from torch import nn

from convmesh.errors import CaptureError, OpaqueLayerWarning
from convmesh.graph import capture

SHAPE = (2, 4, 6, 6)


class ChangesAPart(nn.Module):
    """The first channels change in `x` too, since they share its memory."""

    def forward(self, x: Any) -> Any:
        x = x * 1
        x[:, :2].add_(1)
        return x


class ChangesTheWhole(nn.Module):
    def forward(self, x: Any) -> Any:
        x = x * 1
        part = x[:, :2]
        x += 1
        return part


class Sets(nn.Module):
    def forward(self, x: Any) -> Any:
        x = x * 1
        x[:, 0] += 1
        x[:, 1:3] = 2 * x[:, :2]
        return x


class ChangesItself(nn.Module):
    """One tensor under two names, and a view whose base nobody reads again."""

    def forward(self, x: Any) -> Any:
        y = x = x.flatten(2).sigmoid()
        x = y = (y * 2).view(-1, 36)
        y += 1
        y.mul_(2)
        return x + y


@torch.fx.wrap
def wrapped(x: Any) -> Any:
    return torch.relu(x) if x.shape[1] > 2 else x


class CallsWrapped(nn.Module):
    def forward(self, x: Any) -> Any:
        return wrapped(x) + torch.as_tensor(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(4, 4, 1), inner

    def forward(self, x: Any) -> Any:
        return self.inner(self.conv(x))


@pytest.mark.parametrize("inner", [ChangesAPart(), ChangesTheWhole()])
def test_a_change_that_shows_under_another_name_closes_its_module(inner: nn.Module) -> None:
    with pytest.warns(OpaqueLayerWarning, match="shares memory with one that is read later"):
        captured = capture(Around(inner), SHAPE)
    assert (list(captured.graph.opaque), captured.unchecked) == (["inner"], "")
    with pytest.raises(CaptureError, match=r"test_in_place.py:.* changes a tensor .* into a module of its own"):
        capture(inner, SHAPE)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inner", [Sets(), ChangesItself()])
def test_other_changes_are_captured(inner: nn.Module) -> None:
    captured = capture(Around(inner), SHAPE)
    assert (captured.graph.opaque, captured.unchecked) == ({}, "")


@pytest.mark.filterwarnings("error")
def test_wrapped_functions_are_traced_into() -> None:
    captured = capture(CallsWrapped(), SHAPE)
    assert [node.op for node in captured.graph.nodes if node.outputs] == ["placeholder", "relu", "add", "output"]
