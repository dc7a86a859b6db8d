"""Predicted traffic equals real traffic, by carrier and by mesh axes, here and in a group of 4,096 ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import convmesh as cm
from convmesh import Mesh, models
from convmesh.dist.traffic import Sent
from convmesh.lowering import lower_plan
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Program
from convmesh.testing import RankPool
from tests.conftest import Pools
from tests.runtime.training import fresh

ByAxes = Counter[tuple[str, tuple[str, ...]]]

CASES = [
    ("lenet5", "data", {"data": 4}),
    ("unet2d", "spatial", {"height": 2, "width": 2}),
    ("alexnet", "filter", {"filter": 4}),
    pytest.param("alexnet", "channel", {"channel": 4}, marks=pytest.mark.full),
    ("alexnet", "hybrid", {"data": 4}),
    pytest.param("resnet18", "data+spatial", {"data": 2, "height": 2}, marks=pytest.mark.full),
    ("lenet5", "data+filter", {"data": 2, "filter": 2}),
    pytest.param("cosmoflow", "data+channel", {"data": 2, "channel": 2}, marks=pytest.mark.full),
    ("vit", "channel", {"channel": 2}),
    ("gpt", "data+filter", {"data": 2, "filter": 2}),
    ("gpt", "spatial", {"width": 2}),
    ("convlstm", "spatial", {"height": 2}),
    ("convlstm", "filter", {"filter": 2}),
    ("swin", "spatial", {"height": 2}),
    ("alexnet", "pipeline", {"pipe": 4}),
    ("alexnet", "data+pipeline", {"pipe": 2, "data": 2}),
]


def told(program: Program) -> ByAxes:
    """Bytes of a step by carrier and axes."""
    found: ByAxes = Counter()
    for transfer, times in program.transfers():
        found[transfer.carrier, transfer.axes] += transfer.bytes_sent * times
    return +found


def step(net: Any, x: torch.Tensor, target: Any = None) -> ByAxes:
    """Bytes that a step sends, by carrier and axes, without those that share the loss."""
    shards = [net.shard_input(x), *([net.shard_target(target)] if target is not None else [])]
    net(*shards)  # the very first step checks that ranks agree
    found: ByAxes = Counter()

    def note(event: object) -> None:
        if isinstance(event, Sent):
            found[event.carrier, event.axes] += event.bytes_sent

    net.mesh.traffic.listener = note
    y = net(*shards)
    y.backward(torch.ones_like(y))
    net.mesh.traffic.listener = None
    return Counter({key: size for key, size in found.items() if size and key != ("broadcast", ("pipe",))})


def local_sum(y: Sharded, target: Any) -> torch.Tensor:
    """A loss that sends nothing."""
    del target
    return y.local.sum()


def sent_here(name: str, mesh: Mesh, strategy: str) -> tuple[ByAxes, ByAxes]:
    model, x, target, _ = fresh(name)
    loss = local_sum if "pipe" in mesh.axes else None
    net = cm.parallelize(model, cm.plan(model, tuple(x.shape), mesh, strategy), loss=loss)
    return step(net, x, target if loss else None), told(net.program)


@pytest.mark.parametrize(("name", "strategy", "axes"), CASES)
def test_what_is_sent_along_which_axes_is_predicted(
    pools: Pools, name: str, strategy: str, axes: dict[str, int]
) -> None:
    mesh = Mesh(**axes)
    results = pools[mesh.size].run(sent_here, name, mesh, strategy)
    model, x, _, _ = fresh(name)
    predicted = cm.predict(cm.plan(model, tuple(x.shape), mesh, strategy), "abci").sent
    for rank, (sent, program) in enumerate(results):
        assert sent == program, f"rank {rank}"
        if rank in predicted:
            by_axes: Counter[tuple[str, ...]] = Counter()
            for (_, along), size in sent.items():
                by_axes[along] += size
            assert by_axes == +Counter(predicted[rank])


SUMMED = [
    ("alexnet", "data", {"data": 2}, {"compression": "bf16"}),
    ("alexnet", "data", {"data": 2}, {"compression": "powersgd-2"}),
    ("lenet5", "data", {"data": 2}, {"compression": "bf16", "reduction": "sharded"}),
    ("lenet5", "data", {"data": 2}, {"compression": "bf16", "reduction": "broadcast"}),
    ("resnet18", "data+spatial", {"data": 2, "height": 2}, {"compression": "powersgd-4"}),
    ("alexnet", "data+filter", {"data": 2, "filter": 2}, {"compression": "powersgd-1"}),
    ("alexnet", "data+pipeline", {"pipe": 2, "data": 2}, {"compression": "powersgd-4"}),
    ("lenet5", "data", {"data": 4}, {"reduction": "hierarchical", "ranks_per_host": 2}),
    ("lenet5", "data", {"data": 6}, {"reduction": "hierarchical", "ranks_per_host": 3}),
    ("lenet5", "data", {"data": 4}, {"reduction": "hierarchical", "ranks_per_host": 2, "compression": "bf16"}),
    ("resnet18", "data+spatial", {"data": 2, "height": 2}, {"reduction": "hierarchical", "ranks_per_host": 2}),
]


def sent_summed(name: str, mesh: Mesh, strategy: str, options: dict[str, Any]) -> tuple[ByAxes, ByAxes]:
    model, x, target, _ = fresh(name)
    loss = local_sum if "pipe" in mesh.axes else None
    net = cm.parallelize(model, cm.plan(model, tuple(x.shape), mesh, strategy, **options), loss=loss)
    return step(net, x, target if loss else None), told(net.program)


@pytest.mark.parametrize(("name", "strategy", "axes", "options"), SUMMED)
def test_what_is_sent_to_sum_gradients_is_predicted(
    pools: Pools, name: str, strategy: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    mesh = Mesh(**axes)
    for rank, (sent, program) in enumerate(pools[mesh.size].run(sent_summed, name, mesh, strategy, options)):
        assert sent == program, f"rank {rank}"


@pytest.mark.parametrize(("compression", "most"), [("bf16", 1 / 4), ("powersgd-1", 1 / 30), ("powersgd-4", 1 / 9)])
def test_compressed_gradients_are_small(compression: Any, most: float) -> None:
    """Of float64 weights: the small alexnet's, most of which are in matrices."""
    model, x, _, _ = fresh("alexnet")
    plans = (cm.plan(model, tuple(x.shape), Mesh(data=2), "data", compression=c) for c in ("none", compression))
    whole, compressed = (sum(sent.bytes_sent for sent in lower_plan(plan).program.reduction) for plan in plans)
    assert compressed <= most * whole


def sent_among_4096(rank: int, axes: dict[str, int], strategy: str) -> tuple[ByAxes, ByAxes]:
    """One rank runs with real tensors; a process group that moves nothing replaces the others."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4096)
    small = models.find("resnet18").small()
    model, sample = small.create().double(), small.draw_input()[:1].double()
    mesh = Mesh(**axes)
    shape = (mesh.axes["data"], *sample.shape[1:])
    net = cm.parallelize(model, cm.plan(model, shape, mesh, strategy))
    return step(net, sample.expand(shape)), told(net.program)


@pytest.mark.parametrize(
    ("rank", "axes", "strategy"),
    [
        (2747, {"data": 512, "height": 4, "width": 2}, "data+spatial"),
        (4095, {"data": 1024, "filter": 4}, "data+filter"),
    ],
)
def test_a_rank_among_4096_sends_what_its_program_says(rank: int, axes: dict[str, int], strategy: str) -> None:
    with RankPool(1) as alone:
        ((sent, program),) = alone.run(sent_among_4096, rank, axes, strategy)
    assert sent == program
    assert {name for _, along in sent for name in along} == set(axes), "something travels along every axis"
