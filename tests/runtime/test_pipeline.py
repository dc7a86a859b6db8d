"""Pipelines train like one process that accumulates gradients of the same micro-batches, and send what they predict."""

import functools
import itertools
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh, models
from convmesh.errors import ConvMeshError, PlanError, UnsupportedError
from convmesh.graph import capture
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.dice import dice_loss
from convmesh.plans.plan import Schedule
from convmesh.plans.stage_graph import StageGraph
from tests.conftest import Pools
from tests.runtime.pipelines import FILTERS, HEIGHT, gradients_of, largest, small, split, worst
from tests.runtime.training import STEPS, Trained, assert_same, fresh, optimizer, rate_of, train_split

NETWORKS: list[tuple[str, dict[str, int], Any, dict[str, Any]]] = [
    ("resnet18", {"pipe": 2}, "pipeline", {"microbatches": 2, "schedule": "1f1b", "checkpoint": ["stage*.0"]}),
    ("resnet18", {"pipe": 2}, "pipeline", {"microbatches": 2, "schedule": "interleaved"}),
    ("resnet18", {"pipe": 2}, "pipeline", {"microbatches": 2, "schedule": "zero-bubble"}),
    ("resnet18", {"pipe": 2, "data": 2}, "data+pipeline", {"microbatches": 2, "schedule": "zero-bubble"}),
    ("unet2d", {"pipe": 4}, "pipeline", {"microbatches": 4, "schedule": "1f1b"}),
    ("unet3d", {"pipe": 2, "height": 2}, HEIGHT, {"microbatches": 2, "schedule": "interleaved"}),
]


GRIDS: list[tuple[dict[str, int], str]] = [
    ({"pipe": 2}, "pipeline"), ({"pipe": 4}, "pipeline"), ({"pipe": 8}, "pipeline"),
    ({"pipe": 2, "data": 2}, "data+pipeline"), ({"pipe": 4, "data": 2}, "data+pipeline"),
]  # fmt: skip


def every_network() -> list[Any]:
    """All reference networks under both presets on 2, 4 and 8 ranks, schedules in turn; for `make test-full`."""
    listed = [(name, axes, strategy) for name in models.names() for axes, strategy in GRIDS]
    schedules = itertools.cycle(get_args(Schedule))
    return [
        pytest.param(
            *(name, axes, strategy, {"microbatches": 2, "schedule": next(schedules)}),
            id=f"{name}-{strategy}-{'x'.join(map(str, axes.values()))}",
            marks=pytest.mark.full,
        )
        for name, axes, strategy in listed
    ]


def microbatches(samples: int, count: int, ranks: int) -> torch.Tensor:
    """The samples of each micro-batch: the first part of every rank's share, then the second."""
    return torch.arange(samples).view(ranks, count, -1).transpose(0, 1).reshape(count, -1)


def train_accumulated(name: str, count: int, ranks: int) -> Trained:
    """Train in one process with plain torch, micro-batch by micro-batch."""
    model, x, target, loss_of = fresh(name)
    opt = optimizer(model.parameters(), rate_of(name))
    losses, gradients = [], {}
    for step in range(STEPS):
        opt.zero_grad()
        parts = [loss_of(model(x[rows]), target[rows]) / count for rows in microbatches(len(x), count, ranks)]
        torch.stack(parts).sum().backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        losses.append(sum(part.item() for part in parts))
    return Trained(losses, {k: v.detach().clone() for k, v in model.state_dict().items()}, gradients)


@functools.cache
def most_stages(name: str) -> int:
    small = models.find(name).small()
    return len(StageGraph(capture(small.create(), small.shape).graph).places) + 1


@pytest.mark.parametrize(("name", "axes", "strategy", "options"), [*NETWORKS, *every_network()])
def test_networks_train_as_with_accumulated_microbatches(
    pools: Pools, name: str, axes: dict[str, int], strategy: Any, options: dict[str, Any]
) -> None:
    mesh = Mesh(**axes)
    most = most_stages(name)
    if mesh.axes["pipe"] > most:
        with pytest.raises(PlanError, match=f"into {most} at most"):
            cm.plan(models.find(name).small().create(), models.find(name).small().shape, mesh, strategy, **options)
        return
    if options["schedule"] == "interleaved" and 2 * mesh.axes["pipe"] > most:
        options = {**options, "schedule": "1f1b"}
    (whole,) = pools[1].run(train_accumulated, name, options["microbatches"], axes.get("data", 1))
    assert_same(pools[mesh.size].run(train_split, name, mesh, strategy, options), whole)


def error_of_loss(loss: Any, mesh: Mesh, strategy: Any, ignored: bool) -> float:
    """The error of a pipeline's gradients and loss against one process with the whole batch."""
    reference, x, target = small()
    if ignored:
        target[:3] = -100
        target[5, 2:] = -100
    expected = loss(reference(x), target)
    expected.backward()
    net = split(small()[0], mesh, loss, strategy)
    found = net(net.shard_input(x), net.shard_target(target))
    found.backward()
    return max(abs(float(found.item() - expected.item())), worst(net.full_gradients(), gradients_of(reference)))


WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
SUMMED = functools.partial(F.cross_entropy, reduction="sum")


def own_sum(y: Any, target: Any) -> Any:
    return F.cross_entropy(y, target, reduction="sum")


@pytest.mark.parametrize("loss", [F.cross_entropy, WEIGHTED, SUMMED, own_sum], ids=["mean", "weights", "sum", "own"])
def test_the_loss_is_that_of_the_whole_batch(pools: Pools, loss: Any) -> None:
    ignored = loss is not own_sum
    assert largest(pools[2].run(error_of_loss, loss, Mesh(pipe=2), None, ignored)) < 1e-10


SWITCHING = {"*": {"height": "height"}, "head": {"sample": "height"}}


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [({"pipe": 2, "data": 2}, None), ({"pipe": 2, "height": 2}, SWITCHING), ({"pipe": 2, "filter": 2}, FILTERS)],
    ids=["data", "samples at the end only", "filters"],
)
def test_other_axes_cut_stages_as_they_cut_networks(pools: Pools, axes: dict[str, int], strategy: Any) -> None:
    assert largest(pools[4].run(error_of_loss, F.cross_entropy, Mesh(**axes), strategy, True)) < 1e-10


def refused_loss() -> str:
    model, x, target = small()
    net = split(model, Mesh(pipe=2), functools.partial(dice_loss, activation="softmax", batch=True))
    try:
        net(net.shard_input(x), net.shard_target(target))
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_loss_that_is_no_mean_or_sum_of_microbatches_is_refused_on_every_rank(pools: Pools) -> None:
    assert all("neither the mean nor the sum" in told for told in pools[2].run(refused_loss))


def without_reduction() -> str:
    model, x, target = small()
    net = split(model, Mesh(pipe=2), functools.partial(F.cross_entropy, reduction="none"))
    with pytest.raises(ConvMeshError) as caught:
        net(net.shard_input(x), net.shard_target(target))
    return str(caught.value)


def test_a_loss_of_many_numbers_is_refused_on_every_rank(pools: Pools) -> None:
    assert all("must give one number" in told for told in pools[2].run(without_reduction))


class Odd(nn.Module):
    """Two inputs and two outputs, a weight that the network reads itself, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, 4, 1, 1), 1.5))
        self.first, self.twice, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.twice(F.relu(self.twice(self.first(x)), inplace=True))
        early = y.mean((2, 3))
        return {"map": self.last(y * self.scale * mask), "early": early}


def both(made: Any, target: Any) -> Any:
    return F.cross_entropy(made["map"], target) + (made["early"] * made["early"]).mean()


def odd_error(axes: dict[str, int]) -> float:
    torch.manual_seed(0)
    reference, model = Odd().double(), Odd().double()
    model.load_state_dict(reference.state_dict())
    x, mask = torch.randn(8, 2, 6, 6, dtype=torch.float64), torch.rand(8, 1, 6, 6, dtype=torch.float64)
    target = torch.randint(0, 3, (8, 6, 6))
    made = reference(x, mask)
    both(made, target).backward()
    splits = {"*": {"height": "height"} if "height" in axes else {}}
    plan = cm.plan(model, [x, mask], Mesh(**axes), splits, microbatches=4)
    net = cm.parallelize(model, plan, loss=both)
    net(*net.shard_input(x, mask), net.shard_target(target)).backward()
    outputs = net.gather_output(net(*net.shard_input(x, mask)))
    errors = [float((outputs[name] - made[name]).abs().max().detach()) for name in made]
    return max(*errors, worst(net.full_gradients(), gradients_of(reference)))


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "height": 2}], ids=str)
def test_several_inputs_and_outputs_shared_layers_and_bare_weights(pools: Pools, axes: dict[str, int]) -> None:
    assert largest(pools[Mesh(**axes).size].run(odd_error, axes)) < 1e-10


def local_sum(y: Sharded, target: Any) -> torch.Tensor:
    """A loss that sends nothing."""
    return y.local.sum()


def sent(axes: dict[str, int], strategy: Any, schedule: str) -> tuple[Any, ...]:
    """What the program says this rank sends, and what it does send, without the loss."""
    model, x, target = small()
    model.enter.requires_grad_(False)
    net = split(model, Mesh(**axes), local_sum, strategy, schedule=schedule)
    shards = net.shard_input(x), net.shard_target(target)
    net(*shards).backward()
    with net.mesh.traffic.watch() as seen:
        net(*shards).backward()
    for counter in (seen.bytes_sent, seen.calls):
        del counter["broadcast"]
    return net.program.bytes_sent, net.program.messages, seen.bytes_sent, seen.calls


TRAFFIC = [
    ({"pipe": 2}, None, "gpipe"),
    ({"pipe": 2, "data": 2}, None, "interleaved"),
    ({"pipe": 2, "height": 2}, HEIGHT, "1f1b"),
    ({"pipe": 2, "height": 2}, HEIGHT, "zero-bubble"),
    ({"pipe": 2, "filter": 2}, FILTERS, "zero-bubble"),
]


@pytest.mark.parametrize(("axes", "strategy", "schedule"), TRAFFIC)
def test_what_is_sent_is_what_the_program_says(
    pools: Pools, axes: dict[str, int], strategy: Any, schedule: str
) -> None:
    for rank, (told, messages, bytes_, calls) in enumerate(
        pools[Mesh(**axes).size].run(sent, axes, strategy, schedule)
    ):
        assert told["stage"] > 0
        assert +bytes_ == +told, f"bytes of rank {rank}"
        assert +calls == +messages, f"messages of rank {rank}"
