"""A sharded optimiser matches the weights of an ordinary one and keeps part of the state on each rank."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh, OpenMesh, UnsupportedError
from convmesh.dist import Traffic, dry_mesh
from convmesh.gradients.buckets import Slot
from convmesh.gradients.reduction import GradientReducer
from convmesh.gradients.scattered import ShardedReducer, cut_into_pieces
from convmesh.gradients.sharded_optimizer import ShardedOptimizer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, assert_same, batches, whole

Pools = dict[int, RankPool]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


def groups(net: Towers) -> list[dict[str, Any]]:
    fine = list(net.fine.parameters())
    others = [*net.coarse.parameters(), *net.unused.parameters(), net.cut]
    return [{"params": fine}, {"params": others, "lr": 0.003, "weight_decay": 0.1}]


def trained(name: str, mesh: Mesh | None, **options: Any) -> dict[str, Any]:
    """Four steps with two groups, a schedule, accumulation and clipping."""
    make, settings = OPTIMIZERS[name]
    net = Towers(None if mesh is None else opened(mesh))
    optimizer: Any
    if mesh is None:
        optimizer = make(groups(net), **settings)
    else:
        _reducer = ShardedReducer(opened(mesh), net.axes_of(), **options)
        optimizer = ShardedOptimizer(groups(net), make, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for first, second in zip(batches(), reversed(batches()), strict=True):
        net(first).backward()
        net(second).backward()
        if mesh is None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        else:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in net.named_parameters()}


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(height=2)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_the_ordinary_optimiser(name: str, mesh: Mesh, pools: Pools) -> None:
    expected = pools[1].run(trained, name, None)[0]
    for found in pools[mesh.size].run(trained, name, mesh):
        assert_same(found, expected)


def same_bits(sharded: bool) -> dict[str, Any]:
    net = Towers(opened(Mesh(data=2)))
    make = ShardedReducer if sharded else GradientReducer
    reducer = make(opened(Mesh(data=2)), net.axes_of(), bytes_bucket=200, bytes_first=50)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
        if isinstance(reducer, ShardedReducer)
        else torch.optim.AdamW(net.parameters(), lr=0.01)
    )
    for x in batches():
        with reducer.no_sync():
            net(-x).backward()
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in net.named_parameters()}


def test_on_two_ranks_the_bits_are_the_same(pools: Pools) -> None:
    (expected, _), found = pools[2].run(same_bits, False), pools[2].run(same_bits, True)
    for weights in found:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def state_of_training() -> tuple[int, int, int]:
    """Bytes of this rank's state, of all weights, and how many bytes of gradients are left at the parameters."""
    mesh = opened(Mesh(data=4))
    net = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30))
    _reducer = ShardedReducer(mesh, [(p, ("data",)) for p in net.parameters()], bytes_first=1 << 10)
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    net(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    left = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    return sum(t.nbytes for t in states), sum(p.nbytes for p in net.parameters()), left


def test_each_rank_keeps_its_part_of_the_state(pools: Pools) -> None:
    found = pools[4].run(state_of_training)
    weights = found[0][1]
    assert sum(state for state, _, _ in found) == 2 * weights  # two moments, each value on one rank
    assert max(state for state, _, _ in found) <= 2 * weights / 4 + 2 * 2 * 4  # at most one value of padding per bucket
    assert all(left == 0 for _, _, left in found)


def step_traffic(mesh: OpenMesh) -> tuple[Traffic, list[int]]:
    net = Towers(None if mesh.is_dry else mesh).to(mesh.device)
    net.mesh = mesh
    _reducer = ShardedReducer(mesh, net.axes_of())
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with mesh.traffic.watch() as sent:
        net(batches()[0].to(mesh.device)).backward()
        optimizer.step()
    return sent, [bucket.elements * 8 for bucket in _reducer.buckets]


def real_traffic(mesh: Mesh) -> tuple[Traffic, list[int]]:
    return step_traffic(opened(mesh))


def dry_traffic(mesh: Mesh) -> list[tuple[Traffic, list[int]]]:
    return [step_traffic(dry_mesh(mesh, rank)) for rank in range(mesh.size)]


def test_traffic_and_dry_traffic(pools: Pools) -> None:
    mesh = Mesh(data=2, height=2)
    real = pools[4].run(real_traffic, mesh)
    assert pools[1].run(dry_traffic, mesh)[0] == real
    for sent, bytes_buckets in real:
        assert sent.bytes_sent["reduce_scatter"] == sent.bytes_sent["all_gather"] == sum(bytes_buckets) // 2
        assert sent.bytes_sent["all_reduce"] == bytes_buckets[1] // 2  # half of one bucket, over two rows


def resumed(interrupted: bool) -> dict[str, Any]:
    net = Towers(opened(Mesh(data=2)))
    _reducer = ShardedReducer(opened(Mesh(data=2)), net.axes_of())
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    for i, x in enumerate(batches()):
        if i == 2 and interrupted:
            saved = optimizer.state_dict()
            optimizer = ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.5)
            optimizer.load_state_dict(saved)
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in net.named_parameters()}


def test_state_is_saved_and_loaded(pools: Pools) -> None:
    for found, expected in zip(pools[2].run(resumed, True), pools[2].run(resumed, False), strict=True):
        assert_same(found, expected, 0.0)


def in_bfloat16(sharded: bool) -> torch.Tensor:
    mesh = opened(Mesh(data=2))
    net = Towers(mesh, torch.bfloat16)
    make = ShardedReducer if sharded else GradientReducer
    reducer = make(mesh, net.axes_of(), dtype_reduce=torch.float32)
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        if isinstance(reducer, ShardedReducer)
        else torch.optim.SGD(net.parameters(), lr=0.1)
    )
    for x in batches(torch.bfloat16):
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_weights_travel_in_their_own_type(pools: Pools) -> None:
    (expected, _), (found, other) = pools[2].run(in_bfloat16, False), pools[2].run(in_bfloat16, True)
    assert torch.equal(found, other)
    # Torch rounds bfloat16 differently at the end of a tensor, and pieces end elsewhere.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8)


def test_pieces_cover_every_value_once() -> None:
    slots = [Slot(torch.empty(n), speaks=True) for n in (3, 0, 8, 1)]
    pieces, size = cut_into_pieces(slots, [3, 0, 8, 1], 5)
    assert size == 3
    assert [(slots.index(p.slot), p.part, p.start, p.stop, p.offset) for p in pieces] == [
        (0, 0, 0, 3, 0), (2, 1, 0, 3, 0), (2, 2, 3, 6, 0), (2, 3, 6, 8, 0), (3, 3, 0, 1, 2),
    ]  # fmt: skip


def refusals() -> None:
    net = nn.Linear(2, 2)
    axes_of = [(p, ("data",)) for p in net.parameters()]
    reducer = ShardedReducer(opened(Mesh(data=2)), axes_of)
    with pytest.raises(UnsupportedError, match=r"LBFGS.*AdamW"):
        ShardedOptimizer(net.parameters(), torch.optim.LBFGS)
    reducer.close()
    _plain = GradientReducer(opened(Mesh(data=2)), axes_of)
    with pytest.raises(UnsupportedError, match="sharded"):
        ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)


def test_optimisers_that_need_whole_parameters_are_refused(pools: Pools) -> None:
    pools[2].run(refusals)


def gathered_gradients(mesh: Mesh) -> float:
    """How far `full_gradients()` under scattered sums is from the gradients of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    model = model.double()
    reference, x, target = copy.deepcopy(model), torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.arange(4) % 3
    nn.functional.cross_entropy(reference(x), target).backward()
    plan = cm.plan(model, x, mesh, "data+filter" if "filter" in mesh.axes else "data", reduction="sharded")
    net = cm.parallelize(model, plan, loss=nn.functional.cross_entropy)
    net(net.shard_input(x), net.shard_target(target)).backward()
    found = net.full_gradients()
    expected = dict(reference.named_parameters())
    assert list(found) == list(expected)
    return max(float((found[name] - torch.as_tensor(p.grad)).abs().max()) for name, p in expected.items())


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=2, filter=2)], ids=str)
def test_a_net_gives_whole_gradients_although_each_rank_keeps_a_part(mesh: Mesh, pools: Pools) -> None:
    assert max(pools[mesh.size].run(gathered_gradients, mesh)) < 1e-12
