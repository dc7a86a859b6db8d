"""Compiled stages train as eager ones: to the bit if replayed as traced, within rounding if compiled."""

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import LabelError
from convmesh.runtime.pipeline.replayed_action import ActionRun
from tests.conftest import Pools
from tests.runtime.pipelines import FILTERS, HEIGHT, Small
from tests.runtime.test_pipeline import NETWORKS
from tests.runtime.training import train_split, values_of_steps

Options = dict[str, Any]
Case = tuple[dict[str, int], Any, Options]


class Normed(Small):
    """With batch norm, whose statistics every micro-batch changes, and dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.body[0], self.body[2] = nn.ReLU(), nn.BatchNorm2d(4)


def made(
    case: Case, compiling: bool | str, loss: Any = F.cross_entropy, dtype: torch.dtype = torch.float64
) -> cm.ParallelNet:
    axes, strategy, options = case
    torch.manual_seed(0)
    model = Normed().to(dtype)
    strategy = strategy or ("data+pipeline" if "data" in axes else "pipeline")
    plan = cm.plan(model, (8, 2, 8, 8), Mesh(**axes), strategy, **{"microbatches": 4, **options})
    net = cm.parallelize(model, plan, loss, compile=compiling)
    net.manual_seed(3)
    return net


def batch(net: cm.ParallelNet, samples: int = 8) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 2, 8, 8, dtype=torch.float64, generator=generator)
    return net.shard_input(x), net.shard_target(torch.randint(0, 3, (samples, 8, 8), generator=generator))


def told(net: cm.ParallelNet) -> list[str]:
    lines: list[str] = net._running.engine.told  # type: ignore[attr-defined]
    return lines


def trained(case: Case, compiling: bool | str) -> tuple[list[torch.Tensor], list[str], int]:
    """Losses, gradients, weights and buffers of steps that accumulate, scale and change the batch; lines; bytes."""
    net = made(case, compiling)
    before = net.mesh.traffic.bytes_total
    values = values_of_steps(net, batch, ((8, 2.0), (6, 1.0)))
    net.eval()
    with torch.no_grad():
        values += [net(*batch(net)), net.gather_output(net(batch(net)[0]))]
    return [*values, *net.full_state_dict().values()], told(net), net.mesh.traffic.bytes_total - before


def differences(cases: list[Case], compiling: bool | str, tolerance: float) -> dict[str, Any]:
    """By case: the largest difference, lines that were told, and bytes, where they are not as they should be."""
    found = {}
    for case in cases:
        expected, _, sent = trained(case, False)
        values, lines, sent_compiled = trained(case, compiling)
        pairs = list(zip(expected, values, strict=True))
        worst = max(float((a - b).abs().max()) for a, b in pairs)
        same = all(torch.equal(a, b) for a, b in pairs) if tolerance == 0 else worst < tolerance
        if not same or lines or sent != sent_compiled:
            found[str(case)] = worst, lines, sent, sent_compiled
    return found


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
PIPE: dict[str, int] = {"pipe": 2}
CASES: list[Case] = [
    *((PIPE, None, {"schedule": schedule}) for schedule in ("1f1b", "zero-bubble")),
    (PIPE, None, {"checkpoint": ["body"]}),
    ({"pipe": 2, "data": 2}, None, {"reduction": "sharded", "microbatches": 2}),
    ({"pipe": 2, "height": 2}, HEIGHT, {"schedule": "zero-bubble"}),
]
MORE: list[Case] = [
    *((PIPE, None, {"schedule": schedule}) for schedule in ("gpipe", "interleaved")),
    ({"pipe": 4}, None, {"schedule": "1f1b"}),
    *(({"pipe": 2, "data": 2}, None, {"schedule": s, "microbatches": 2}) for s in SCHEDULES),
    *(({"pipe": 2, "height": 2}, HEIGHT, {"schedule": s}) for s in SCHEDULES),
    *(({"pipe": 2, "filter": 2}, FILTERS, {"schedule": s}) for s in SCHEDULES),
    ({"pipe": 2, "height": 2}, HEIGHT, {"schedule": "interleaved", "checkpoint": ["body"]}),
    ({"pipe": 4}, None, {"schedule": "gpipe"}),
    ({"pipe": 4}, None, {"schedule": "zero-bubble"}),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_replayed_stages_equal_eager_ones_to_the_bit(pools: Pools, ranks: int) -> None:
    chosen = [case for case in CASES if Mesh(**case[0]).size == ranks]
    assert pools[ranks].run(differences, chosen, "eager", 0.0) == [{}] * ranks


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_replayed_stages_equal_eager_ones_to_the_bit(pools: Pools, ranks: int) -> None:
    chosen = [case for case in MORE if Mesh(**case[0]).size == ranks]
    assert pools[ranks].run(differences, chosen, "eager", 0.0) == [{}] * ranks


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_compiled_stages_equal_eager_ones_within_rounding(pools: Pools, schedule: str) -> None:
    assert pools[2].run(differences, [(PIPE, None, {"schedule": schedule})], True, 1e-10) == [{}] * 2


@pytest.mark.full
@pytest.mark.parametrize(("name", "axes", "strategy", "options"), NETWORKS)
def test_networks_train_as_in_eager_stages(
    pools: Pools, name: str, axes: dict[str, int], strategy: Any, options: Options
) -> None:
    mesh = Mesh(**axes)
    eager, replayed = (pools[mesh.size].run(train_split, name, mesh, strategy, options, c) for c in (False, "eager"))
    for expected, found in zip(eager, replayed, strict=True):
        assert found.losses == expected.losses
        for table, other in ((found.state, expected.state), (found.gradients, expected.gradients)):
            assert all(torch.equal(table[key], value) for key, value in other.items())


def in_bfloat16(compiling: bool | str) -> list[torch.Tensor]:
    net = made((PIPE, None, {"schedule": "zero-bubble"}), compiling, dtype=torch.float32)
    x, target = batch(net)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x.float(), target)
    loss.backward()
    assert told(net) == []
    return [loss.detach(), *net.full_gradients().values()]


def test_autocast_is_as_in_eager_stages(pools: Pools) -> None:
    for eager, found in zip(pools[2].run(in_bfloat16, False), pools[2].run(in_bfloat16, "eager"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


class Weighted(nn.Module):
    """A loss with a weight that learns, and whose sum a pipeline finds out by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target, reduction="sum") * self.scale


def with_loss(name: str, compiling: bool | str) -> list[torch.Tensor]:
    """Losses and gradients of two steps, the second on targets that do not count but for one micro-batch."""
    loss: Any = Weighted() if name == "weighted" else F.cross_entropy
    net = made((PIPE, None, {}), compiling, loss)
    x, target = batch(net)
    values = []
    for step in range(2):
        net.zero_grad()
        if step and name == "ignored":
            target[2:] = -100
        found = net(x, target)
        found.backward()
        values += [found.detach(), *(g.clone() for g in net.full_gradients().values())]
    assert told(net) == []
    has_grad = name == "weighted" and loss.scale.grad is not None
    return [*values, *([loss.scale.grad] if has_grad else [])]


@pytest.mark.parametrize("name", ["weighted", "ignored"])
def test_losses_are_weighed_as_in_eager_stages(pools: Pools, name: str) -> None:
    eager, found = pools[2].run(with_loss, name, False), pools[2].run(with_loss, name, "eager")
    assert len(found[1]) - len(found[0]) == (name == "weighted")
    for expected, values in zip(eager, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, values, strict=True))


class Looking(nn.Module):
    """A loss that looks at its own value, as no graph can."""

    def forward(self, output: Any, target: Any) -> Any:
        loss = F.cross_entropy(output, target)
        return loss * 2 if loss.item() > 1e9 else loss


def fallbacks() -> list[list[str]]:
    """The lines for a loss that cannot be traced, and for a hook; wrong labels; kinds of micro-batches."""
    lines = []
    for loss in (Looking(), F.cross_entropy):
        net = made((PIPE, None, {}), "eager", loss)
        seen: list[int] = []
        if loss is F.cross_entropy:
            net.get_submodule("head").register_forward_hook(lambda *_, seen=seen: seen.append(1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                net(*batch(net)).backward()
        assert all(p.grad is not None for p in net.parameters())
        assert len(seen) == (8 if loss is F.cross_entropy and net.mesh.rank == 1 else 0)
        texts = [str(w.message) for w in caught if "`compile`" in str(w.message)]
        assert len(texts) == len(told(net))
        lines.append(texts)
    net = made((PIPE, None, {}), "eager")
    x, target = batch(net)
    net(x, target).backward()
    with pytest.raises(LabelError, match="label 9"):
        net(x, torch.full_like(target, 9))
    net(x, target).backward()
    return lines


def test_what_cannot_be_traced_runs_eagerly_with_a_line_from_its_stage(pools: Pools) -> None:
    of_first, ((looking,), (hooked,)) = pools[2].run(fallbacks)
    assert of_first == [[], []]
    assert looking.startswith("`compile`: a stage cannot be traced (")
    assert hooked.startswith("`compile`: a layer (Conv2d) has hooks")


def kinds_of_actions() -> list[int]:
    """Traces that each of a rank's stages keeps, after batches of several sizes, in training and evaluation."""
    net = made((PIPE, None, {"schedule": "interleaved"}), "eager")
    for samples in (8, 8, 6):
        net(*batch(net, samples)).backward()
    net.eval()
    net(*batch(net)).backward()
    engine: Any = net._running.engine
    stages = [stage.submod for runner in engine._runners.values() for stage in runner._training[1]._stages]
    return [len(stage._actions) for stage in stages]


def test_each_kind_of_micro_batch_is_traced_once(pools: Pools) -> None:
    assert pools[2].run(kinds_of_actions) == [[2, 2, 1, 1]] * 2


def left_in_memory(schedule: str) -> int:
    """Tensors that replays still hold after steps with gradients and without."""
    net = made((PIPE, None, {"schedule": schedule}), "eager")
    args = batch(net)
    net(*args).backward()
    with torch.no_grad():
        net(*args)
    runs = [
        each for each in gc.get_objects() if type(each) is ActionRun
    ]  # of proxies, `isinstance` asks what they stand for
    return sum(len(run._run._values) + sum(g is not None for g in run._found) for run in runs)


def test_nothing_of_a_micro_batch_is_left_behind(pools: Pools) -> None:
    """A schedule holds the losses of a step until the next."""
    for schedule in ("1f1b", "zero-bubble"):
        assert pools[2].run(left_in_memory, schedule) == [0, 0]
