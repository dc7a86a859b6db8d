"""Autocast of tensors without data casts what torch's own casts, on either kind of device, call by call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from convmesh.private_torch.autocast_lists import policies
from convmesh.private_torch.dispatching import TorchDispatchMode
from convmesh.private_torch.meta_autocast import KINDS, Cast, meta_autocast, meta_cast
from convmesh.private_torch.tracing import FakeTensorMode

Make = Callable[..., torch.Tensor]
Call = Callable[[Make], Any]

CALLS: dict[str, Call] = {
    "conv1d": lambda t: F.conv1d(t(2, 3, 8), t(4, 3, 3), t(4)),
    "conv2d same": lambda t: F.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3), padding="same"),
    "conv3d": lambda t: F.conv3d(t(2, 3, 4, 4, 4), t(4, 3, 3, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(2, 3, 8, 8), t(3, 4, 2, 2)),
    "linear": lambda t: F.linear(t(2, 8), t(4, 8), t(4)),
    "linear of tokens": lambda t: F.linear(t(2, 3, 8), t(4, 8)),
    "matmul": lambda t: t(2, 3, 8) @ t(2, 8, 4),
    "einsum": lambda t: torch.einsum("bij,bjk->bik", t(2, 3, 8), t(2, 8, 4)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 3, 4), t(2, 3, 8), t(2, 8, 4)),
    "prelu": lambda t: F.prelu(t(2, 3, 8), t(3)),
    "relu": lambda t: F.relu(t(2, 3, 8, 8)),
    "batch norm": lambda t: F.batch_norm(t(2, 3, 8, 8), None, None, t(3).float(), training=True),
    "layer norm": lambda t: F.layer_norm(t(2, 8), (8,)),
    "group norm": lambda t: F.group_norm(t(2, 4, 8, 8), 2),
    "max pool 3d": lambda t: F.max_pool3d(t(2, 3, 4, 4, 4), 2),
    "avg pool 3d": lambda t: F.avg_pool3d(t(2, 3, 4, 4, 4), 2),
    "adaptive pool 3d": lambda t: F.adaptive_avg_pool3d(t(2, 3, 4, 4, 4), 2),
    "interpolate": lambda t: F.interpolate(t(2, 3, 4, 4), scale_factor=2, mode="bilinear"),
    "nearest": lambda t: F.interpolate(t(2, 3, 4, 4), scale_factor=2),
    "pad": lambda t: F.pad(t(2, 3, 4, 4), (1, 1, 1, 1), mode="reflect"),
    "cat": lambda t: torch.cat([t(2, 3), t(2, 3)]),
    "cat of two types": lambda t: torch.cat([t(2, 3), t(2, 3).float()]),
    "stack of two types": lambda t: torch.stack([t(2, 3), t(2, 3).float()]),
    "softmax": lambda t: F.softmax(t(2, 3), 1),
    "softmax in a type": lambda t: F.softmax(t(2, 3), 1, dtype=torch.float16),
    "log softmax": lambda t: F.log_softmax(t(2, 3), 1),
    "sum": lambda t: t(2, 3).sum(),
    "sum of a dim": lambda t: t(2, 3).sum(1, keepdim=True),
    "sum of integers": lambda t: (t(2, 3) > 0).sum(),
    "mean": lambda t: t(2, 3).mean(),
    "prod": lambda t: t(2, 3).prod(1),
    "cumsum": lambda t: t(2, 3).cumsum(1),
    "vector norm": lambda t: torch.linalg.vector_norm(t(2, 3), dim=1),
    "exp": lambda t: t(2, 3).exp(),
    "log1p": lambda t: t(2, 3).log1p(),
    "rsqrt": lambda t: t(2, 3).rsqrt(),
    "power": lambda t: t(2, 3) ** 3,
    "softplus": lambda t: F.softplus(t(2, 3)),
    "addcmul of two types": lambda t: torch.addcmul(t(2, 3), t(2, 3), t(2, 3).float()),
    "cross of two types": lambda t: torch.linalg.cross(t(2, 3), t(2, 3).float()),
    "mse": lambda t: F.mse_loss(t(2, 3), t(2, 3)),
    "cross entropy": lambda t: F.cross_entropy(t(2, 3), (t(2) > 0).long()),
    "entropy with logits": lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3)),
    "float64": lambda t: F.linear(t(2, 3).double(), t(4, 3).double()),
}

CASTS_IN_KERNELS = {"softmax", "log softmax", "batch norm"}
"""GPUs have kernels of two types for these, where tensors without data are cast first: their results are compared."""


class _Types(TorchDispatchMode):
    """Lists the casts that run, from which type to which."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.casts.append((args[0].dtype, result.dtype))
        return result


def _types(call: Call, device: str, given: torch.dtype) -> tuple[list[Any], torch.dtype]:
    with _Types() as seen:
        result = call(lambda *shape: torch.ones(shape, device=device, dtype=given))
    return sorted(seen.casts, key=str), result.dtype


def _of_torch(call: Call, cast: Cast, given: torch.dtype) -> Any:
    """With torch's autocast, on fake tensors of that device: no GPU is needed."""
    kind = cast.kind
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, cast.dtype)
    try:
        with FakeTensorMode():
            return _types(call, kind, given)
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_casts_are_torchs_own(kind: str, name: str) -> None:
    cast = Cast(kind, torch.bfloat16)
    for given in (torch.float32, torch.bfloat16):
        with meta_autocast(cast):
            found = _types(CALLS[name], "meta", given)
        expected = _of_torch(CALLS[name], cast, given)
        assert found[1] == expected[1], f"result of {given}"
        if kind == "cpu" or name not in CASTS_IN_KERNELS:
            assert found == expected, f"casts of {given}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_listed_operator_is_one_that_torch_casts(kind: str) -> None:
    """Of the documented lists; torch itself says which operators there are."""
    known = policies(kind)
    assert {"conv2d", "linear", "matmul", "bmm", "prelu"} <= {name for name, how in known.items() if how == "low"}
    widest = {name for name, how in known.items() if how == "widest"}
    assert ({"cat", "stack"} if kind == "cpu" else {"addcmul", "grid_sampler", "scatter_add"}) <= widest
    assert {known[name] for name in ("mse_loss", "nll_loss", "cdist", "smooth_l1_loss")} == {"float32"}


def test_it_is_on_inside_its_block_alone_and_can_be_turned_off_there() -> None:
    x, weight = torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta", requires_grad=True)
    with meta_autocast(Cast("cpu", torch.bfloat16)):
        y = F.linear(x, weight)
        with meta_autocast(None):
            assert F.linear(x, weight).dtype == torch.float32
        assert F.linear(x, weight).dtype == y.dtype == torch.bfloat16
    assert (meta_cast(), F.linear(x, weight).dtype) == (None, torch.float32)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
