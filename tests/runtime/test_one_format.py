"""A compiled step of a channels-last network: activations stay so, apart from the loss and plain input."""

from typing import Any

import pytest
import torch
from torch import fx, nn

import convmesh as cm
from convmesh import Mesh, models
from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.runtime.compiled.compiled_engine import CompiledEngine
from convmesh.runtime.compiled.traced_graph import Holdings
from convmesh.runtime.compiled.traced_step import trace_step
from convmesh.runtime.net import ParallelNet
from convmesh.testing import opened

from ..conftest import Pools

Changes = tuple[list[str], list[str]]


HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Elsewhere torch computes convolutions in bf16 by kernels that write the plain format alone."""

needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this processor has no channels-last convolutions in bf16")


def graph_of(net: ParallelNet, x: torch.Tensor, target: torch.Tensor, mixed: bool) -> fx.Graph:
    """The step as it is given to a compiler, in mixed precision or in float32."""
    engine = net._running.engine
    assert isinstance(engine, CompiledEngine)
    inputs, targets = net._placed((net.shard_input(x), net.shard_target(target)))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        step = trace_step(engine.eager, Holdings(engine._modules), inputs, targets, fuse=True, backward=True)
    return step.graph.module.graph


def changes(graph: fx.Graph, dims: int) -> Changes:
    """What writes activations in another format than it reads them, and what only copies parts without gaps."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and _value(n) is not None and _value(n).dim() == dims]
    pairs = [
        (n, s) for n in nodes for s in n.all_input_nodes if _value(s) is not None and _is_alike(_value(n), _value(s))
    ]
    formats = [_name(n) for n, source in pairs if _order(_value(n)) != _order(_value(source))]
    clones = [_name(s) for n, s in pairs if _name(n) == "clone" and _order(_value(n)) == _order(_value(s))]
    return formats, clones


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _is_alike(value: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both are activations of one shape whose format can be told."""
    return value.shape == source.shape and all(extent > 1 for extent in value.shape[1:])


def _order(value: torch.Tensor) -> list[int]:
    return sorted(range(value.dim()), key=value.stride, reverse=True)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


def of_network(name: str, mixed: bool) -> Changes:
    small = models.find(name).small()
    draws = torch.Generator().manual_seed(0)
    x, target = small.draw_input(draws).float(), small.draw_target(draws)
    last: Any = CHANNELS_LAST[x.dim()]
    model: Any = small.create().float().to(memory_format=last)  # type: ignore[call-overload]
    plan = cm.plan(model, tuple(x.shape), Mesh(), "data")
    net = cm.parallelize(model, plan, small.task.loss(), mesh=opened(Mesh()), compile="eager")
    return changes(graph_of(net, x.contiguous(memory_format=last), target, mixed), x.dim())


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=needs_bf16)])
def test_a_unet_changes_the_format_at_its_output_alone(pools: Pools, mixed: bool) -> None:
    """There and back: the loss reads classes as torch's kernel wants them. A gradient of one input of `cat` is a part
    with gaps, which no kernel of a convolution in bf16 reads: one copy a level."""
    formats, parts = pools[1].run(of_network, "unet3d", mixed)[0]
    assert len(formats) == 2
    assert parts == ["slice"] * (4 if mixed else 0)


def of_plain_input() -> tuple[list[str], list[str]]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    net = cm.parallelize(
        model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        cm.plan(model, (2, 3, 16, 16), Mesh(), "data"),
        lambda y, target: (y.float() - target).square().mean(),
        mesh=opened(Mesh()),
        compile="eager",
    )
    last: Any = {"memory_format": torch.channels_last}
    return changes(graph_of(net, torch.randn(2, 3, 16, 16), torch.randn(2, 4, 12, 12).contiguous(**last), HAS_BF16), 4)


def test_plain_input_is_converted_once(pools: Pools) -> None:
    """For forward and backward together."""
    formats, _ = pools[1].run(of_plain_input)[0]
    assert formats.count("clone") == 1
