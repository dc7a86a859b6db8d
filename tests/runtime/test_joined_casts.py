"""Casts of weights and gradients: the same values, by few calls."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import convmesh as cm
from convmesh import Mesh
from convmesh.runtime.compiled.joined_casts import cast_all, join_gradient_casts, join_weight_casts
from convmesh.testing import opened

from ..conftest import Pools
from .test_compiled_step import small_net, told

BF16 = torch.bfloat16
Tensors = list[torch.Tensor]


def step(x: torch.Tensor, mean: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Two convolutions in bfloat16, and a mean that is updated before it is cast."""
    leaves = [w.requires_grad_() for w in weights]
    mean.add_(1)
    y = F.conv2d(x.to(BF16) - mean.to(BF16), leaves[0].to(BF16))
    loss = F.conv2d(y, leaves[1].to(BF16)).float().square().mean() + leaves[2].sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def given() -> Tensors:
    torch.manual_seed(0)
    weights = [torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(5, 4, 1, 1)]
    return [torch.randn(2, 3, 6, 6), torch.zeros(3, 1, 1), *weights, torch.randn(2)]


def traced() -> fx.GraphModule:
    module = make_fx(step, tracing_mode="fake")(*given())
    module.graph.eliminate_dead_code()
    return module


def calls_of(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=cast_all))


def results(module: fx.GraphModule) -> Any:
    module.graph.lint()
    module.recompile()
    return module(*given())


def assert_equal(found: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weights_are_cast_by_one_call_and_what_changes_is_cast_where_it_was() -> None:
    module = traced()
    expected = results(module)
    join_weight_casts(module.graph)
    (call,) = calls_of(module)
    assert [str(source) for source in call.args[0]] == ["arg0_1", "arg2_1", "arg3_1"]  # type: ignore[union-attr]
    assert_equal(results(module), expected)


def test_gradients_are_cast_by_one_call() -> None:
    module = traced()
    expected = results(module)
    join_gradient_casts(module.graph, 3, [])
    (call,) = calls_of(module)
    assert len(call.args[0]) == 2  # type: ignore[arg-type]
    assert_equal(results(module), expected)


def test_gradients_of_buckets_are_left_as_they_were_computed() -> None:
    module = traced()
    expected = results(module)
    join_gradient_casts(module.graph, 3, [0])
    found = results(module)
    assert [t.dtype for t in found] == [torch.float32, BF16, torch.float32, torch.float32]
    assert_equal([found[0], found[1].float(), *found[2:]], expected)


def gradients_under_autocast(axes: dict[str, int], options: dict[str, Any], compiling: bool | str) -> Tensors:
    """Of two steps in which gradients are added up, in float32 though kernels compute in bfloat16."""
    model = small_net(dropout=0.0)
    mesh = Mesh(**axes)
    plan = cm.plan(model, (8, 3, 16, 16), mesh, "data", batchnorm="replica", **options)
    net = cm.parallelize(model, plan, F.cross_entropy, mesh=opened(mesh), compile=compiling)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    args = net.shard_input(x), net.shard_target(torch.arange(8) % 4)
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            loss = net(*args)
        loss.backward()
    assert not told(net)
    return list(net.full_gradients().values())


def differing(axes: dict[str, int]) -> list[str]:
    wrong = []
    for options in ({}, {"reduction": "sharded"}):
        pairs = zip(*(gradients_under_autocast(axes, options, c) for c in (False, "eager")), strict=True)
        wrong += [f"{options} {a.dtype} {b.dtype}" for a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]
    return wrong


def test_buckets_take_gradients_in_the_type_of_kernels(pools: Pools) -> None:
    assert pools[2].run(differing, {"data": 2}) == [[], []]
