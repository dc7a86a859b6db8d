"""Ways of training: recomputation, accumulation, mixed precision, sharded optimisers, other batches: all exact."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.gradients import GradScaler, clip_grad_norm_
from convmesh.plans import strategy_for
from tests.conftest import Pools
from tests.runtime.training import STEPS, References, Trained, assert_same, fresh, optimizer, take_steps, train_split

MESH = Mesh(data=2, height=2)


@pytest.fixture(scope="module")
def references(pools: Pools) -> References:
    return References(pools[1])


@pytest.mark.parametrize(
    ("name", "strategy", "axes", "options"),
    [
        ("resnet18", "data+spatial", {"data": 2, "height": 2}, {"checkpoint": ["stage1.*", "stage3"]}),
        ("unet3d", "spatial", {"depth": 2}, {"checkpoint": ["*"]}),
        ("resnet18", "data+spatial", {"data": 2, "height": 2}, {"reduction": "broadcast"}),
        ("lenet5", "data", {"data": 4}, {"reduction": "hierarchical", "ranks_per_host": 2}),
        ("alexnet", "hybrid", {"data": 2}, {"sub_batches": 2}),
        ("resnet18", "spatial", {"height": 2}, {"least_rows": 9}),
    ],
)
def test_options_change_no_number(
    pools: Pools, references: References, name: str, strategy: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    mesh = Mesh(**axes)
    whole = references[name]
    found = pools[mesh.size].run(train_split, name, mesh, strategy, options)
    if options.get("reduction") == "broadcast":  # only the root has gradients
        found = [Trained(f.losses, f.state) for f in found]
    assert_same(found, whole)


def held_state(opt: torch.optim.Optimizer) -> int:
    """Elements of an optimiser's state."""
    return sum(v.numel() for state in opt.state.values() for v in state.values() if v.numel() > 1)


def train_sharded(name: str) -> tuple[Trained, int]:
    model, x, target, loss_of = fresh(name)
    net = cm.parallelize(model, cm.plan(model, x, MESH, "data+spatial", reduction="sharded"), loss=loss_of)
    opt = net.optimizer(torch.optim.AdamW, lr=0.05)
    args = net.shard_input(x), net.shard_target(target)
    losses = take_steps(opt, lambda: net(*args))
    return Trained(losses, net.full_state_dict()), held_state(opt)


def train_adam(name: str) -> tuple[Trained, int]:
    model, x, target, loss_of = fresh(name)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = take_steps(opt, lambda: loss_of(model(x), target))
    return Trained(losses, model.state_dict()), held_state(opt)


def test_optimiser_state_sharded_over_data_is_smaller_and_as_exact(pools: Pools) -> None:
    ((whole, held_whole),) = pools[1].run(train_adam, "resnet18")
    found = pools[4].run(train_sharded, "resnet18")
    # Adam divides by the root of tiny numbers in its first steps, which magnifies rounding.
    assert_same([trained for trained, _ in found], whole, tolerance=1e-6)
    assert all(held < 0.55 * held_whole for _, held in found)


def accumulate(mesh: Mesh | None, syncs: bool) -> dict[str, torch.Tensor]:
    """Gradients of two batches, one backward each, clipped."""
    model, x, target, loss_of = fresh("lenet5")
    parts = list(zip(x.chunk(2), target.chunk(2), strict=True))
    if mesh is None:
        for part, goal in parts:
            (loss_of(model(part), goal) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=loss_of)
    for i, (part, goal) in enumerate(parts):
        args = net.shard_input(part), net.shard_target(goal)
        if i == 0 and not syncs:
            with net.no_sync(), net.mesh.traffic.watch() as seen:
                (net(*args) / 2).backward()
            assert "all_reduce" not in seen.bytes_sent or mesh.axes.keys() != {"data"} or seen.bytes_total < 1000
        else:
            (net(*args) / 2).backward()
    clip_grad_norm_(net.parameters(), 0.1)
    return net.full_gradients()


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "filter": 2}, {"height": 2}])
def test_accumulated_and_clipped_gradients(pools: Pools, axes: dict[str, int], syncs: bool) -> None:
    (whole,) = pools[1].run(accumulate, None, True)
    mesh = Mesh(**axes)
    for found in pools[mesh.size].run(accumulate, mesh, syncs):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def odd_batches(mesh: Mesh | None) -> list[Any]:
    """Losses, gradients and outputs for batches that do not divide evenly, down to one sample for several ranks."""
    model, x, target, loss_of = fresh("lenet5")
    net = None if mesh is None else cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=loss_of)
    found: list[Any] = []
    for samples in (x.shape[0], 3, 1):
        part, goal = x[:samples], target[:samples]
        model.zero_grad()
        if net is None:
            loss, y = loss_of(model(part), goal), model(part)
        else:
            loss = net(net.shard_input(part), net.shard_target(goal))
            y = net.gather_output(net(net.shard_input(part)))
        loss.backward()
        gradients = net.full_gradients() if net else {n: p.grad for n, p in model.named_parameters()}
        found.append((loss.detach(), y.detach(), gradients))
    return found


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "height": 2}])
def test_batches_of_other_sizes(pools: Pools, axes: dict[str, int]) -> None:
    (whole,) = pools[1].run(odd_batches, None)
    mesh = Mesh(**axes)
    for found in pools[mesh.size].run(odd_batches, mesh):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def kept_for_backward(checkpoint: list[str]) -> int:
    """Bytes that a forward pass keeps, except weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid()))) for _ in "12")
    )
    plan = cm.plan(model, (2, 4, 16, 16), Mesh(height=2), "spatial", checkpoint=checkpoint)
    net = cm.parallelize(model, plan, loss=F.mse_loss)
    args = net.shard_input(torch.randn(2, 4, 16, 16)), net.shard_target(torch.zeros(2, 4, 16, 16))
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(*args)
    loss.backward()
    return sum(kept.values())


def test_recomputed_blocks_keep_only_their_inputs(pools: Pools) -> None:
    everything, little = (pools[2].run(kept_for_backward, names)[0] for names in ([], ["?"]))
    assert little < 0.6 * everything


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout2d(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(F.relu(self.drop(self.norm(self.conv(x)))).mean((2, 3)))
        return result


def dropped(mesh: Mesh, recompute: bool) -> list[Any]:
    """Losses with dropout, then the output in eval mode."""
    torch.manual_seed(0)
    model = Normed().double()
    x, target = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    plan = cm.plan(model, x, mesh, strategy_for(mesh), checkpoint=["conv", "norm", "drop"] if recompute else [])
    net = cm.parallelize(model, plan, loss=F.cross_entropy)
    args = net.shard_input(x), net.shard_target(target)
    losses = take_steps(optimizer(net.parameters()), lambda: net(*args))
    net.eval()
    with torch.no_grad():
        y = net.gather_output(net(net.shard_input(x)))
    return [losses, y, net.full_state_dict()]


@pytest.mark.parametrize("recompute", [False, True])
def test_masks_depend_on_neither_mesh_nor_recomputation(pools: Pools, recompute: bool) -> None:
    (alone,) = pools[1].run(dropped, Mesh(), False)
    for mesh in (Mesh(data=2), Mesh(height=2)):
        for found in pools[2].run(dropped, mesh, recompute):
            torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


def in_bfloat16(mesh: Mesh | None) -> tuple[list[float], list[torch.dtype], int]:
    """Losses under autocast, the types of gradients, and the bytes of halos."""
    torch.manual_seed(0)
    model = Normed().eval()
    x, target = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    net = (
        None
        if mesh is None
        else cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=F.cross_entropy)
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, sent = [], 0
    for _ in range(STEPS):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if net is None:
                loss = F.cross_entropy(model(x), target)
            else:
                with net.mesh.traffic.watch() as seen:
                    loss = net(net.shard_input(x), net.shard_target(target))
                sent = seen.bytes_sent["neighbour"]
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, [p.grad.dtype for p in model.parameters() if p.grad is not None], sent


def test_autocast_halves_the_halos_and_keeps_the_losses(pools: Pools) -> None:
    ((whole, types, _),) = pools[1].run(in_bfloat16, None)
    for found, found_types, sent in pools[2].run(in_bfloat16, Mesh(height=2)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(whole), rtol=2e-2, atol=2e-2)
        assert found_types == types
        assert sent == 4 * 3 * 8 * 2, "one row of 4 samples, 3 channels and 8 columns, two bytes each"


def scaled(mesh: Mesh) -> tuple[float, float, bool]:
    """A step whose gradients overflow on one rank only is skipped on all."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3, padding=1)
    net = cm.parallelize(
        model, cm.plan(model, (2, 2, 8, 8), mesh, strategy_for(mesh)), loss=lambda y, t: ((y - t) ** 2).mean()
    )
    scaler = GradScaler(init_scale=2.0**10)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.full_state_dict()["weight"]
    x, target = torch.randn(2, 2, 8, 8), torch.zeros(2, 4, 8, 8)
    scaler.scale(net(net.shard_input(x), net.shard_target(target))).backward()
    weight = next(net.parameters())
    if net.mesh.rank == 0:
        held: Any = getattr(weight.grad, "_local_tensor", weight.grad)
        held.view(-1)[0] = torch.inf
    scaler.step(opt)
    scaler.update()
    return scaler.get_scale(), 2.0**10, torch.equal(net.full_state_dict()["weight"], before)


@pytest.mark.parametrize("axes", [{"filter": 2}])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pools: Pools, axes: dict[str, int]) -> None:
    for scale, before, unchanged in pools[2].run(scaled, Mesh(**axes)):
        assert scale < before
        assert unchanged


class DropsItself(nn.Module):
    """Reads `self.training` in the network's own forward and in that of a part."""

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.part, self.head = nn.Conv2d(1, 4, 3, padding=1), DropsItself.Part(), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.head(self.part(self.conv(x))), 0.5, self.training)


def modes_followed(mesh: Mesh, options: dict[str, Any]) -> list[bool]:
    torch.manual_seed(0)
    model, x = DropsItself(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        expected = model.eval()(x)
        model.train()
        net = cm.parallelize(model, cm.plan(model, x, mesh, **options))
        outputs = [net.gather_output(net.train(mode)(net.shard_input(x))) for mode in (False, True, False)]
    return [torch.allclose(y, expected, atol=1e-6) for y in outputs]


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"height": 2}, {"strategy": "spatial"}),
        ({"height": 2}, {"strategy": "spatial", "checkpoint": ["*"]}),
        ({"pipe": 2}, {"strategy": "pipeline"}),
    ],
)
def test_functions_that_read_the_mode_follow_it(pools: Pools, axes: dict[str, int], options: dict[str, Any]) -> None:
    for found in pools[2].run(modes_followed, Mesh(**axes), options):
        assert found == [True, False, True]
