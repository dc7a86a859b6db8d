"""Methods that change their tensor, and plain tensors that take a sharded one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convmesh import Mesh
from convmesh.testing import SplitCase

Check = Callable[[SplitCase], None]
MESH = Mesh(height=2, width=2)
SHAPES = ((2, 3, 5, 4), (2, 3, 5, 4))


def arithmetic(x: Any, y: Any) -> Any:
    z = x * 1
    same = z
    z.add_(y, alpha=2).mul_(y[:1]).sub_(1).div_(3)
    z.addcmul_(x, y, value=0.5).lerp_(y, 0.3).clamp_(-2, 2)
    return same


def functions(x: Any, y: Any) -> Any:
    z = F.relu_(x + y) + torch.sigmoid_(x * 2)
    return z.masked_fill_(y > 0, 3.0).copy_(z + y[:, :, :1])


def of_a_buffer(x: Any, y: Any) -> Any:
    kept = torch.zeros(3, 5, 4, dtype=torch.float64)
    kept.add_(x.detach().mean(0)).mul_(2)
    kept[:, 1:] = y.detach()[0, :, 1:]
    return x * kept


@pytest.mark.parametrize("call", [arithmetic, functions, of_a_buffer])
@pytest.mark.operator("methods in place", "arithmetic, masks, copies; chains; plain tensors that take sharded ones")
def test_changes_in_place(call: Callable[..., Any], check: Check) -> None:
    check(SplitCase(call, MESH, SHAPES))
    check(SplitCase(call, MESH, SHAPES, cuts=({2: "height"}, {1: "width"})))
