"""Channels-last networks stay so: of a whole step, no layer copies an activation or gradient into another order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh as cm
from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.testing import RankPool

MOST_COPIES = 2  # where a network begins and ends
BYTES_OF_ACTIVATION = 8192
aten = torch.ops.aten


class FormatCopies(TorchDispatchMode):
    """Notes every copy of a large tensor that changes the order of its dims in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.clone.default, aten._to_copy.default):
            self._note(func, args[0], result)
        elif func is aten.copy_.default:
            self._note(func, args[1], args[0])
        return result

    def _note(self, func: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.nbytes >= BYTES_OF_ACTIVATION and _is_activation(source) and _order(source) != _order(target):
            self.found.append(f"{func} of {tuple(source.shape)}, strides {source.stride()} to {target.stride()}")


def _is_activation(tensor: torch.Tensor) -> bool:
    """Whether it is no kernel, no rows of a halo, and nothing that a layer makes of its input on the way."""
    space = tensor.shape[2:]
    return tensor.dim() in CHANNELS_LAST and min(space) > 2 and max(space) > 3


def _order(tensor: torch.Tensor) -> list[int]:
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.stride(dim)]
    return sorted(dims, key=tensor.stride)


class SmallUNet(nn.Module):
    """One level below the top one, with every norm, both ways down and up, and padding."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv: Any = (nn.Conv2d, nn.Conv3d)[dims - 2]
        pairs: Any = ((nn.BatchNorm2d, nn.InstanceNorm2d), (nn.BatchNorm3d, nn.InstanceNorm3d))
        norms = pairs[dims - 2]
        self.top = nn.Sequential(conv(4, 16, 3, padding=1), norms[0](16), nn.ReLU(), conv(16, 16, 3, padding=1))
        self.down: Any = (nn.MaxPool2d, nn.MaxPool3d)[dims - 2](2)
        self.low = nn.Sequential(conv(16, 32, 3, padding=1), norms[1](32), nn.LeakyReLU(), conv(32, 16, 3, padding=1))
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(conv(32, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), conv(16, 4, 1))
        self.border: Any = (nn.ZeroPad2d, nn.ZeroPad3d)[dims - 2](1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.top(x)
        up: torch.Tensor = self.up(self.low(self.down(top)))
        result: torch.Tensor = self.last(self.border(torch.cat([top, up], 1)))
        return result


def copies_of_a_step(shape: tuple[int, ...], mesh: cm.Mesh, compile_by: bool | str) -> list[str]:
    """Of the second step; a first one may be traced."""
    torch.manual_seed(0)
    last = CHANNELS_LAST[len(shape)]
    x = torch.randn(shape).contiguous(memory_format=last)
    model: Any = SmallUNet(len(shape) - 2)
    model.to(memory_format=last)
    plan = cm.plan(model, x, mesh, "spatial", least_rows=2)
    net = cm.parallelize(model, plan, loss=F.cross_entropy, compile=compile_by)
    batch = net.shard_input(x), net.shard_target(torch.randint(0, 4, (shape[0], *shape[2:])))
    net(*batch).backward()
    copies = FormatCopies()
    with copies:
        net(*batch).backward()
    return copies.found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("compile_by", [False, "eager"], ids=["eager", "traced"])
@pytest.mark.parametrize("mesh", [cm.Mesh(), cm.Mesh(height=2)], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (1, 4, 16, 16, 16)], ids=str)
def test_no_layer_copies_into_another_order(
    shape: tuple[int, ...], mesh: cm.Mesh, compile_by: bool | str, pools: dict[int, RankPool]
) -> None:
    run: Callable[..., list[list[str]]] = pools[mesh.size].run
    for found in run(copies_of_a_step, shape, mesh, compile_by):
        assert len(found) <= MOST_COPIES, "\n".join(found)
