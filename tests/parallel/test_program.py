"""Programs say what runs: traffic to the byte, on every rank, for every strategy; they are made without processes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh, models
from convmesh.plan import Transfer, Work
from tests.conftest import Pools
from tests.parallel.training import fresh

CASES = [
    ("lenet5", "data", {"data": 3}),
    ("resnet18", "data+spatial", {"data": 2, "height": 2}),
    ("resnet18", "spatial", {"height": 4}),
    ("resnet18", "filter", {"filter": 2}),
    ("alexnet", "hybrid", {"data": 4}),
    ("alexnet", "data+channel", {"data": 2, "channel": 2}),
    ("unet3d", "spatial", {"depth": 2, "height": 2}),
    ("densenet121", "channel", {"channel": 2}),
    ("convnext-tiny", "data+spatial", {"data": 2, "width": 2}),
    ("mobilenet-v2", "data+filter", {"data": 2, "filter": 2}),
]


def sent_in_a_step(name: str, mesh: Mesh, strategy: str, reduction: str) -> tuple[Any, ...]:
    """What the program says this rank sends, and what it does send, without the loss."""
    model, x, _, _ = fresh(name)
    net = cm.parallelize(model, cm.plan(model, tuple(x.shape), mesh, strategy, reduction=reduction))  # type: ignore[arg-type]
    shard = net.shard_input(x)
    net(shard)  # the first step of all checks that ranks agree
    with net.mesh.traffic.watch() as seen:
        y = net(shard)
        y.backward(torch.ones_like(y))
    return net.program.bytes_sent, net.program.messages, seen.bytes_sent, seen.calls


@pytest.mark.parametrize(("name", "strategy", "axes"), CASES)
def test_what_is_sent_is_what_the_program_says(pools: Pools, name: str, strategy: str, axes: dict[str, int]) -> None:
    mesh = Mesh(**axes)
    for rank, (told, messages, sent, calls) in enumerate(
        pools[mesh.size].run(sent_in_a_step, name, mesh, strategy, "bucketed")
    ):
        assert +sent == +told, f"bytes of rank {rank}"
        assert +calls == +messages, f"messages of rank {rank}"


def test_sharded_gradients_are_in_the_program_too(pools: Pools) -> None:
    mesh = Mesh(data=2, height=2)
    for told, messages, sent, calls in pools[4].run(sent_in_a_step, "resnet18", mesh, "data+spatial", "sharded"):
        assert (+sent, +calls) == (+told, +messages)


def test_a_program_of_any_rank_of_65536_is_made_here() -> None:
    with torch.device("meta"):
        model = models.create("resnet50")
    plan = cm.plan(model, (65_536, 3, 224, 224), Mesh(data=4096, height=4, width=4), "data+spatial")
    corner, inside = (cm.lower_plan(plan, rank).program for rank in (0, 5))
    assert corner.bytes_sent["neighbour"] < inside.bytes_sent["neighbour"]
    assert corner.bytes_sent["all_reduce"] == inside.bytes_sent["all_reduce"]


def test_work_and_transfers_are_listed_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    plan = cm.plan(model, (2, 4, 16, 16), Mesh(height=2), "spatial")
    program = cm.lower_plan(plan, 0).program
    steps = Counter((phase, layer, type(step).__name__) for phase, layer, step in program.steps())
    assert steps["forward", "2", "Transfer"] == 1
    assert steps["backward", "2", "Transfer"] == 1
    assert steps["forward", "0", "Transfer"] == 1
    assert not steps["backward", "0", "Transfer"], "the network's input needs no gradient"
    (halo,) = (s for s in program.nodes[1].forward if isinstance(s, Transfer))
    assert (halo.carrier, halo.axes, halo.peer, halo.bytes_sent) == ("neighbour", ("height",), 1, 2 * 4 * 16 * 4)
    convolutions = [s for s in program.nodes[3].forward if isinstance(s, Work) and s.op == "convolution"]
    assert sum(s.flops for s in convolutions) >= 2 * 2 * 8 * 8 * 9 * 8 * 16


def test_layers_alike_are_worked_out_once_so_a_thousand_take_seconds() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(1000)))
    plan = cm.plan(model, (64, 8, 64, 64), Mesh(data=16, height=4), "data+spatial")
    program = cm.lower_plan(plan, 63).program
    assert len(program.nodes) == 2001
    assert len({id(node.forward) for node in program.nodes}) < 10


def test_a_shared_layer_with_other_cuts_sums_at_once(pools: Pools) -> None:
    (first, second) = pools[2].run(_shared_weights)
    assert first == second == 0.0


def _shared_weights() -> float:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    model = nn.Sequential(conv, nn.AvgPool2d(2), conv, nn.AvgPool2d(4), conv)
    x = torch.randn(1, 2, 32, 32, dtype=torch.float64)
    model(x).sum().backward()
    expected = conv.weight.grad
    assert expected is not None
    conv.weight.grad = conv.bias.grad = None  # type: ignore[union-attr]
    net = cm.parallelize(model, cm.plan(model, (1, 2, 32, 32), Mesh(height=2), {"*": {"height": "height"}, "3": {}}))
    net.gather_output(net(net.shard_input(x))).sum().backward()
    return float((net.full_gradients()["0.weight"] - expected).abs().max() > 1e-10)
