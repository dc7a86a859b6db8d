"""Several networks, and bare layers, on one open mesh: none changes how another runs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.dist import StepSettings
from convmesh.testing import opened
from tests.conftest import Pools

SHAPE = (8, 3, 8, 8)
Numbers = dict[str, torch.Tensor]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 8)
    ).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=generator).double(), torch.randint(0, 8, (8,), generator=generator)


def numbers_of(losses: list[torch.Tensor], state: Numbers) -> Numbers:
    return {**{f"loss {i}": loss.detach() for i, loss in enumerate(losses)}, **state}


class Training:
    """A network and its optimiser, trained step by step."""

    def __init__(self, mesh: Mesh, strategy: str, **options: Any) -> None:
        model, (self.x, self.target) = small_net(), batch()
        plan = cm.plan(model, self.x, mesh, strategy, **options)
        self.net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(mesh))
        self.optimizer = self.net.optimizer(torch.optim.SGD, lr=0.1)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        loss = self.net(self.net.shard_input(self.x), self.net.shard_target(self.target))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)

    def numbers(self) -> Numbers:
        return numbers_of(self.losses, self.net.full_state_dict())


def by_one_process() -> Numbers:
    model, (x, target) = small_net(), batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), target))
        losses[-1].backward()
        optimizer.step()
    return numbers_of(losses, model.state_dict())


def alternately(mesh: Mesh, *choices: tuple[str, dict[str, Any]]) -> list[Numbers]:
    """Networks on one open mesh, a step of each in turn."""
    trainings = [Training(mesh, strategy, **options) for strategy, options in choices]
    for _ in range(2):
        for training in trainings:
            training.step()
    return [training.numbers() for training in trainings]


PLAIN: tuple[str, dict[str, Any]] = ("data", {})


@pytest.mark.parametrize(
    "other",
    [("data", {"reduction": "sharded"}), ("data", {"reduction": "broadcast"}), ("hybrid", {"sub_batches": 2})],
)
def test_two_networks_train_in_turn_as_one_process_does(pools: Pools, other: tuple[str, dict[str, Any]]) -> None:
    (whole,) = pools[1].run(by_one_process)
    for numbers in pools[2].run(alternately, Mesh(data=2), PLAIN, other, PLAIN):
        for trained in numbers:
            torch.testing.assert_close(trained, whole, rtol=1e-9, atol=1e-11)


def test_statistics_of_replicas_are_one_networks_choice(pools: Pools) -> None:
    (whole,) = pools[1].run(by_one_process)
    alone = pools[2].run(alternately, Mesh(data=2), ("data", {"batchnorm": "replica"}))
    together = pools[2].run(alternately, Mesh(data=2), PLAIN, ("data", {"batchnorm": "replica"}))
    for (plain, replica), (replica_alone,) in zip(together, alone, strict=True):
        torch.testing.assert_close(plain, whole, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(replica, replica_alone, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(replica["loss 0"], whole["loss 0"], rtol=1e-6)


def bare_layer(mesh: Mesh | None) -> Numbers:
    """Gradients of a layer on a sharded tensor, with a network on the same mesh."""
    torch.manual_seed(2)
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    x: Any = batch()[0]
    if mesh is not None:
        training = Training(mesh, "data")
        assert training.net.mesh is opened(mesh)
        training.step()
        x = cm.shard(x, opened(mesh), {0: "data"})
    layer(x).square().mean().backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def test_bare_layers_sum_their_gradients_beside_a_network(pools: Pools) -> None:
    (whole,) = pools[1].run(bare_layer, None)
    for gradients in pools[2].run(bare_layer, Mesh(data=2)):
        torch.testing.assert_close(gradients, whole, rtol=1e-10, atol=1e-12)


class WeightedLoss(nn.Module):
    """A loss with a layer of its own, which no plan knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(8, 8).double()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(output), target)


def loss_gradients(mesh: Mesh | None) -> Numbers:
    model, (x, target), loss_of = small_net(), batch(), WeightedLoss()
    if mesh is None:
        loss_of(model(x), target).backward()
    else:
        plan = cm.plan(model, x, mesh, "data")
        net = cm.parallelize(model, plan, loss=loss_of, mesh=opened(mesh))
        net(net.shard_input(x), net.shard_target(target)).backward()
    return {name: p.grad for name, p in loss_of.named_parameters() if p.grad is not None}


def test_weights_of_a_loss_get_whole_gradients(pools: Pools) -> None:
    (whole,) = pools[1].run(loss_gradients, None)
    for gradients in pools[2].run(loss_gradients, Mesh(data=2)):
        torch.testing.assert_close(gradients, whole, rtol=1e-10, atol=1e-12)


def settings_after_parallelize() -> list[StepSettings]:
    mesh = opened(Mesh(data=2))
    before = mesh.settings
    Training(Mesh(data=2), "data", batchnorm="replica")
    return [before, mesh.settings]


def test_a_mesh_that_is_passed_in_stays_as_it_is(pools: Pools) -> None:
    assert pools[2].run(settings_after_parallelize) == [[StepSettings()] * 2] * 2


class Unseen(nn.Module):
    """Looks at values, so that it is not traced; its weight is another layer's too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, padding=1) * (2.0 if x.abs().sum() > 0 else 1.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False).double()
        weight = self.conv.weight
        assert isinstance(weight, nn.Parameter)
        self.unseen = Unseen(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.unseen(self.conv(x).relu())
        return result


def tied_gradient(mesh: Mesh | None) -> torch.Tensor:
    model, (x, _) = Tied(), batch()
    target = torch.ones(SHAPE, dtype=torch.float64)
    if mesh is None:
        F.mse_loss(model(x), target).backward()
    else:
        with pytest.warns(cm.errors.OpaqueLayerWarning):
            plan = cm.plan(model, x, mesh, "data+spatial")
        net = cm.parallelize(model, plan, loss=F.mse_loss, mesh=opened(mesh))
        net(net.shard_input(x), net.shard_target(target)).backward()
    gradient: torch.Tensor | None = model.conv.weight.grad
    assert gradient is not None
    return gradient


def test_a_weight_shared_with_a_module_that_is_not_traced_is_summed_once(pools: Pools) -> None:
    (whole,) = pools[1].run(tied_gradient, None)
    for gradient in pools[4].run(tied_gradient, Mesh(data=2, height=2)):
        torch.testing.assert_close(gradient, whole, rtol=1e-10, atol=1e-12)
