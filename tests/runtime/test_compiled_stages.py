"""Compiled stages train as eager ones: to the bit if replayed as traced, within rounding if compiled."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from tests.conftest import Pools
from tests.runtime.pipelines import FILTERS, HEIGHT, Small

Options = dict[str, Any]
Case = tuple[dict[str, int], Any, Options]


class Normed(Small):
    """With batch norm, whose statistics every micro-batch changes, and dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.body[0], self.body[2] = nn.ReLU(), nn.BatchNorm2d(4)


def made(case: Case, compiling: bool | str, loss: Any = F.cross_entropy) -> cm.ParallelNet:
    axes, strategy, options = case
    torch.manual_seed(0)
    model = Normed().double()
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
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    before, values = net.mesh.traffic.bytes_total, []
    for samples, factor in ((8, 2.0), (6, 1.0)):
        net.zero_grad()
        with net.no_sync() if factor != 1 else nullcontext():
            first = net(*batch(net, samples))
            first.backward()
        second = net(*batch(net, samples))
        (second * factor).backward()
        values += [first.detach(), second.detach(), *(g.clone() for g in net.full_gradients().values())]
        optimizer.step()
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
    *((PIPE, None, {"schedule": schedule}) for schedule in SCHEDULES),
    (PIPE, None, {"checkpoint": ["body"]}),
    ({"pipe": 2, "data": 2}, None, {"schedule": "zero-bubble", "microbatches": 2}),
    ({"pipe": 2, "data": 2}, None, {"reduction": "sharded", "microbatches": 2}),
    ({"pipe": 2, "height": 2}, HEIGHT, {"schedule": "1f1b"}),
    ({"pipe": 2, "height": 2}, HEIGHT, {"schedule": "zero-bubble"}),
    ({"pipe": 2, "filter": 2}, FILTERS, {"schedule": "interleaved"}),
    ({"pipe": 4}, None, {"schedule": "1f1b"}),
    ({"pipe": 4}, None, {"schedule": "zero-bubble"}),
]
MORE: list[Case] = [
    *(({"pipe": 2, "data": 2}, None, {"schedule": s, "microbatches": 2}) for s in SCHEDULES),
    *(({"pipe": 2, "height": 2}, HEIGHT, {"schedule": s}) for s in SCHEDULES),
    *(({"pipe": 2, "filter": 2}, FILTERS, {"schedule": s}) for s in SCHEDULES),
    ({"pipe": 2, "height": 2}, HEIGHT, {"schedule": "interleaved", "checkpoint": ["body"]}),
    ({"pipe": 4}, None, {"schedule": "gpipe"}),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_replayed_stages_equal_eager_ones_to_the_bit(pools: Pools, ranks: int) -> None:
    chosen = [case for case in CASES if Mesh(**case[0]).size == ranks]
    assert pools[ranks].run(differences, chosen, "eager", 0.0) == [{}] * ranks


@pytest.mark.full
def test_more_replayed_stages_equal_eager_ones_to_the_bit(pools: Pools) -> None:
    assert pools[4].run(differences, MORE, "eager", 0.0) == [{}] * 4


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_compiled_stages_equal_eager_ones_within_rounding(pools: Pools, schedule: str) -> None:
    assert pools[2].run(differences, [(PIPE, None, {"schedule": schedule})], True, 1e-10) == [{}] * 2
