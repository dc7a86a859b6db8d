"""A network that is dropped leaves nothing behind: no weights, gradients or hooks, here or in torch's registries."""

import copy
import gc
import linecache
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as torch_optimizer

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import LayoutError
from convmesh.plans.summing import Reduction
from convmesh.private_torch.graph_sources import sources_kept
from convmesh.testing import opened
from tests.conftest import Pools

Options = dict[str, Any]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


def trained(mesh: Mesh, strategy: str, options: Options, building: Options) -> tuple[cm.ParallelNet, Any, cm.Plan]:
    model, x, target = small_net(), torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    plan = cm.plan(model, x, mesh, strategy, **options)
    net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(mesh), **building)
    optimizer = net.optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        net(net.shard_input(x), net.shard_target(target)).backward()
        optimizer.step()
    return net, optimizer, plan


def parts_of(net: cm.ParallelNet, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Everything that must go with a network."""
    yield from net.named_modules(prefix="module")
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        yield name, tensor
        yield f"gradient of {name}", tensor.grad
    for number, state in enumerate(optimizer.state.values()):
        yield from ((f"{name} of parameter {number}", value) for name, value in state.items())
    yield "optimizer", optimizer


def registered() -> dict[str, int]:
    """The sizes of torch's registries that a network adds to."""
    return {
        "hooks before steps": len(torch_optimizer._global_optimizer_pre_hooks),
        "hooks after steps": len(torch_optimizer._global_optimizer_post_hooks),
        "sources of graphs": sources_kept(),
        "lines of graphs": sum("eval_with_key" in name for name in linecache.cache),
    }


def left_by(mesh: Mesh, strategy: str, options: Options, building: Options) -> list[str]:
    """What is alive of a network that was dropped while its plan was kept, and what grew after both had gone."""
    before = registered()
    net, optimizer, plan = trained(mesh, strategy, options, building)
    references = {name: weakref.ref(part) for name, part in parts_of(net, optimizer) if part is not None}
    assert len(references) > 20
    del net, optimizer
    gc.collect()
    left = [name for name, reference in references.items() if reference() is not None]
    assert plan.source is not None
    del plan
    gc.collect()
    return left + [f"{name}: {size - before[name]}" for name, size in registered().items() if size != before[name]]


REDUCTIONS = ("bucketed", "sharded", "broadcast")
CASES: list[tuple[Mesh, str, Options, Options]] = [
    *((Mesh(data=2), "data", {"reduction": name}, {}) for name in REDUCTIONS),
    *((Mesh(data=2), "hybrid", {"reduction": name}, {}) for name in REDUCTIONS),
    (Mesh(data=2), "data", {"batchnorm": "replica", "checkpoint": ["0", "4"]}, {}),
    (Mesh(data=2), "auto", {}, {}),
    (Mesh(data=2), "data", {}, {"compile": "eager"}),
    (Mesh(height=2), "spatial", {}, {}),
    (Mesh(filter=2), "filter", {}, {}),
    (Mesh(channel=2), "channel", {}, {}),
]
PIPELINES: list[tuple[Mesh, str, Options, Options]] = [
    (Mesh(data=2, pipe=2), "data+pipeline", {"schedule": schedule, "microbatches": 4}, {})
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
]


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Garbage collection looks at what is made inside alone: a second less each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@only_new_objects()
def left_by_all(cases: list[tuple[Mesh, str, Options, Options]]) -> dict[str, list[str]]:
    found = {
        f"{strategy} {options} {building}": left_by(m, strategy, options, building)
        for m, strategy, options, building in cases
    }
    return {case: left for case, left in found.items() if left}


@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, PIPELINES)], ids=["every rank", "stages"])
def test_a_dropped_network_leaves_nothing(pools: Pools, ranks: int, cases: Any) -> None:
    assert pools[ranks].run(left_by_all, cases) == [{}] * ranks


def mebibytes_held() -> int:
    """Memory of this process that is its own: pages of files come and go with what else the machine does."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")) >> 10


@only_new_objects()
def growth(count: int) -> int:
    """By how many MiB a process grows that makes, trains and drops networks of 8 MiB of weights.

    The least of ten tells what is held for good: what an allocator has not given back yet comes and goes.
    """
    x, target = torch.randn(4, 16), torch.arange(4)
    held = []
    for _ in range(count):
        model = nn.Sequential(nn.Linear(16, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 16))
        net = cm.parallelize(model, cm.plan(model, x, Mesh(data=2), "data"), loss=F.cross_entropy)
        net(net.shard_input(x), net.shard_target(target)).backward()
        net.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9).step()
        del model, net
        gc.collect()
        held.append(mebibytes_held())
    return min(held[-10:]) - min(held[5:15])


def test_many_networks_need_the_memory_of_one(pools: Pools) -> None:
    """Between the first ten that count and the last, 25 are dropped, which would be 200 MiB of weights alone."""
    assert max(pools[2].run(growth, 50)) < 32


def hooks_of(model: nn.Module) -> int:
    tables = [m._forward_pre_hooks for m in model.modules()] + [model._state_dict_pre_hooks]
    on_parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    return sum(map(len, (*tables, *on_parameters)))


@only_new_objects()
def reused(reduction: Reduction) -> tuple[int, int, bool]:
    """Hooks on a model before and after its network is dropped; whether its next network trains it as the first did."""
    model, x, target = small_net(), torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    fresh, gradients, counts = copy.deepcopy(model.state_dict()), [], []
    for _ in range(2):
        model.load_state_dict(fresh)
        model.zero_grad()
        plan = cm.plan(model, x, Mesh(data=2), "data", reduction=reduction)
        net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(Mesh(data=2)))
        counts.append(hooks_of(model))
        net(net.shard_input(x), net.shard_target(target)).backward()
        gradients.append({name: g.clone() for name, g in net.full_gradients().items()})
        del net
        gc.collect()
        counts.append(hooks_of(model))
    same = all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())
    return counts[0], counts[1], same


@pytest.mark.parametrize("reduction", ["bucketed", "broadcast"])
def test_a_model_is_free_again_without_its_network(pools: Pools, reduction: Reduction) -> None:
    for before, after, same in pools[2].run(reused, reduction):
        assert before > 0
        assert after == 0
        assert same


def twice() -> None:
    model, x = small_net(), torch.randn(8, 3, 8, 8)
    plan = cm.plan(model, x, Mesh(data=2), "data")
    first = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(Mesh(data=2)))
    with pytest.raises(LayoutError, match=r"earlier network of the same model; drop that network first"):
        cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(Mesh(data=2)))
    del first
    cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(Mesh(data=2)))


def test_two_networks_of_one_model_are_refused(pools: Pools) -> None:
    pools[2].run(twice)


@only_new_objects()
def test_a_plan_keeps_no_weights() -> None:
    model = small_net()
    plan = cm.plan(model, (8, 3, 8, 8), Mesh(data=2), "data")
    before = cm.predict(plan, cm.System.load("dgx-a100"))
    weights = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert cm.predict(plan, cm.System.load("dgx-a100")) == before
