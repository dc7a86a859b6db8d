"""Programs match what runs: traffic to the byte, on every rank, for every strategy; lowering needs no processes."""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh as cm
from convmesh import Mesh, models
from convmesh.graph import capture
from convmesh.kernels.fusing import fusing
from convmesh.lowering import lower
from convmesh.lowering.call_text import written
from convmesh.lowering.operator_calls import FREE
from convmesh.ops.core.probe import Probe, is_probing
from convmesh.plans import Transfer, Wait, Work
from convmesh.plans.plan import Precision
from convmesh.plans.summing import Reduction
from tests.conftest import Pools
from tests.runtime.training import fresh

CASES = [
    ("lenet5", "data", {"data": 3}),
    ("resnet18", "data+spatial", {"data": 2, "height": 2}),
    pytest.param("resnet18", "spatial", {"height": 4}, marks=pytest.mark.full),
    ("resnet18", "data+filter", {"data": 2, "filter": 2}),
    pytest.param("alexnet", "hybrid", {"data": 4}, marks=pytest.mark.full),
    ("alexnet", "data+channel", {"data": 2, "channel": 2}),
    ("unet3d", "spatial", {"depth": 2, "height": 2}),
    ("densenet121", "channel", {"channel": 2}),
    ("convnext-tiny", "data+spatial", {"data": 2, "width": 2}),
    ("mobilenet-v2", "filter", {"filter": 2}),
]


class Step(NamedTuple):
    """What the program says that this rank sends and computes in a step, and what it does, without the loss."""

    bytes_told: Counter[Any]
    messages_told: Counter[Any]
    calls_told: Counter[str]
    bytes_sent: Counter[Any]
    messages: Counter[Any]
    calls: Counter[str]


def step_of(
    name: str,
    mesh: Mesh,
    strategy: str,
    precision: Precision = "",
    reduction: Reduction = "bucketed",
    fuses: bool = False,
) -> Step:
    """With `fuses`, in the operators that a compiler is given."""
    model, x, _, _ = fresh(name)
    if precision:
        model, x = model.float(), x.float()
    plan = cm.plan(model, tuple(x.shape), mesh, strategy, precision=precision, reduction=reduction, compile=fuses)
    net = cm.parallelize(model, plan)
    shard, cast = net.shard_input(x), torch.autocast("cpu", torch.bfloat16, enabled=bool(precision))
    with cast:
        net(shard)  # the very first step checks that ranks agree
    with net.mesh.traffic.watch() as seen, fusing() if fuses else nullcontext(), _Calls() as calls:
        with cast:
            y = net(shard)
        y.backward(torch.ones_like(y))
    steps = (step for phase, _, step in net.program.steps() if phase in ("forward", "backward"))
    told = Counter(step.call for step in steps if isinstance(step, Work) and step.call)
    said = Counter(net.program.bytes_sent), Counter(net.program.messages), _without(told)
    return Step(*said, seen.bytes_sent, seen.calls, _without(calls.found))


@pytest.fixture(scope="module")
def steps_of(pools: Pools) -> Callable[..., list[Step]]:
    """The step of every rank, taken once for all that is asked of it."""

    @functools.cache
    def run(name: str, mesh: Mesh, strategy: str) -> list[Step]:
        return pools[mesh.size].run(step_of, name, mesh, strategy)

    return run


@pytest.mark.parametrize(("name", "strategy", "axes"), CASES)
def test_what_is_sent_is_what_the_program_says(
    steps_of: Callable[..., list[Step]], name: str, strategy: str, axes: dict[str, int]
) -> None:
    for rank, step in enumerate(steps_of(name, Mesh(**axes), strategy)):
        assert +step.bytes_sent == +step.bytes_told, f"bytes of rank {rank}"
        assert +step.messages == +step.messages_told, f"messages of rank {rank}"


BESIDE = ("copy_", "_foreach_copy_", "fill_", "_local_scalar_dense", "isfinite", "isnan", "all", "stack", "ones_like")
"""Operators of the gradients' way into `.grad` and buckets, and of the look at the result: they are told apart."""


class _Calls(TorchDispatchMode):
    """Counts the operators that run, in the notation of programs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is dispatched again, with the shards inside
        is_probe = Probe.is_made or is_probing(args)  # it asks torch for a shape
        if func.namespace == "aten" and not is_probe and not func.is_view and func.overloadpacket.__name__ not in FREE:
            self.found[written(func, args, kwargs or {})] += 1
        return func(*args, **(kwargs or {}))


def _without(calls: Counter[str]) -> Counter[str]:
    return Counter({call: count for call, count in calls.items() if call.partition(".")[0] not in BESIDE})


@pytest.mark.parametrize(("name", "strategy", "axes"), CASES)
def test_what_is_computed_is_what_the_program_says(
    steps_of: Callable[..., list[Step]], name: str, strategy: str, axes: dict[str, int]
) -> None:
    """Operator by operator, with shapes, options and the memory format of every operand."""
    for rank, step in enumerate(steps_of(name, Mesh(**axes), strategy)):
        assert (step.calls - step.calls_told, step.calls_told - step.calls) == (Counter(), Counter()), (
            f"rank {rank}: only computed, only in the program"
        )


COMPILED = [
    ("resnet18", "data+spatial", {"data": 2, "height": 2}, ""),
    ("unet3d", "spatial", {"depth": 2, "height": 2}, "amp-bf16"),
    ("alexnet", "data+channel", {"data": 2, "channel": 2}, "amp-bf16"),
]


@pytest.mark.parametrize(("name", "strategy", "axes", "precision"), COMPILED)
def test_what_a_compiler_is_given_is_what_its_program_says(
    pools: Pools, name: str, strategy: str, axes: dict[str, int], precision: Precision
) -> None:
    """Operator by operator, before any is fused; transfers to the byte."""
    mesh = Mesh(**axes)
    for rank, step in enumerate(pools[mesh.size].run(step_of, name, mesh, strategy, precision, "bucketed", True)):
        assert (+step.bytes_sent, +step.messages) == (+step.bytes_told, +step.messages_told), f"rank {rank}"
        assert (step.calls - step.calls_told, step.calls_told - step.calls) == (Counter(), Counter()), f"rank {rank}"


def test_sharded_gradients_are_in_the_program_too(pools: Pools) -> None:
    for step in pools[4].run(step_of, "resnet18", Mesh(data=2, height=2), "data+spatial", "", "sharded"):
        assert (+step.bytes_sent, +step.messages) == (+step.bytes_told, +step.messages_told)


def test_every_transfer_is_waited_for_once_where_backward_comes_in_two_parts() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    )
    plan = cm.plan(model, (8, 4, 16, 16), Mesh(pipe=2, data=2), "data+pipeline", schedule="zero-bubble")
    program = cm.lower_plan(plan, 2).program
    split = [node for node in program.nodes if node.weight_steps and any(isinstance(s, Wait) for s in node.backward)]
    assert split
    for node in split:
        sent = [index for index, step in enumerate(node.backward) if isinstance(step, Transfer)]
        waits = [(at, number) for at, s in enumerate(node.backward) if isinstance(s, Wait) for number in s.transfers]
        assert sorted(number for _, number in waits) == [*range(len(sent))]
        assert all(sent[number] < at for at, number in waits)


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


def test_equal_layers_are_lowered_once_so_a_thousand_take_seconds() -> None:
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


class Positions(nn.Module):
    """Positions made of two parameters, the second added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.rows, self.columns = nn.Parameter(torch.zeros(8, 1)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.rows.repeat(1, 8)
        places.add_(self.columns)
        made: torch.Tensor = self.conv(x)
        return made.add_(places)


def test_what_is_made_of_weights_alone_may_be_changed_in_place() -> None:
    model = Positions()
    verified = cm.verify(model, (2, 3, 8, 8), cm.plan(model, (2, 3, 8, 8), Mesh(height=2), "spatial"), steps=1)
    assert verified.ok, str(verified)


class Tokens(nn.Module):
    """A network of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(8, 4), nn.Linear(4, 12), nn.Linear(12, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(torch.relu(self.up(self.words(words))))
        return made


@pytest.mark.parametrize(("axis", "strategy"), [("data", "data"), ("width", "spatial"), ("height", "spatial")])
def test_samples_and_tokens_of_words_are_cut_from_the_input_on(axis: str, strategy: str) -> None:
    model, words = Tokens(), torch.randint(8, (4, 6))
    plan = cm.plan(model, words, Mesh(**{axis: 2}), strategy)
    nodes = lower(capture(model, words), plan).program.nodes
    assert all(layout.axes == (axis,) for node in nodes for layout in node.outputs)
    verified = cm.verify(model, words, plan, steps=1)
    assert verified.ok, str(verified)


@pytest.mark.parametrize("strategy", ["filter", "channel"])
def test_dense_layers_on_tokens_pair_up(strategy: str) -> None:
    model, words = Tokens(), torch.randint(8, (4, 6))
    plan = cm.plan(model, words, Mesh(**{strategy: 2}), strategy)
    assert [plan.split(layer).algorithm for layer in ("up", "head")] == ["y", "x"]
    weights = {weight.name: weight.local_shape for weight in lower(capture(model, words), plan).program.weights}
    assert weights["up.weight"] == (6, 4)
    verified = cm.verify(model, words, plan, steps=1)
    assert verified.ok, str(verified)


def test_a_network_without_layers_to_cut_says_so() -> None:
    model, words = nn.Embedding(8, 4), torch.randint(8, (4, 6))
    assert "filter cuts no layer of this network" in str(cm.plan(model, words, Mesh(filter=2), "filter"))
