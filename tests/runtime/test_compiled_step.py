"""A compiled step trains as an eager one: to the bit if it is replayed as traced, within rounding if it is compiled."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.dist.launching import Posting
from convmesh.errors import ConvMeshError, DisagreementError, LabelError, PlanError
from convmesh.runtime.compiled.step_calls import BackwardPiece, Posts, StepCall, StepCalls, Waits, agreed_segments
from convmesh.runtime.net import ParallelNet
from convmesh.testing import opened

from ..conftest import Pools
from .training import values_of_steps

Options = dict[str, Any]
Found = tuple[list[torch.Tensor], list[str], int]


def small_net(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, 2, 1),
        nn.InstanceNorm2d(8, affine=True), nn.Dropout(dropout), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def made(mesh: Mesh, strategy: str, options: Options, compiling: bool | str, **building: Any) -> ParallelNet:
    model = small_net().double()
    plan = cm.plan(model, (8, 3, 16, 16), mesh, strategy, **options)
    net = cm.parallelize(model, plan, F.cross_entropy, mesh=opened(mesh), compile=compiling, **building)
    net.manual_seed(3)
    return net


def batch(net: ParallelNet, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, 16, 16, dtype=torch.float64, generator=generator)
    return net.shard_input(x), net.shard_target(torch.arange(samples) % 4)


def told(net: ParallelNet) -> list[str]:
    reasons: list[str] = getattr(net._running.engine, "told", [])
    return reasons


def trained(mesh: Mesh, strategy: str, options: Options, compiling: bool | str) -> Found:
    """Losses, gradients, weights and buffers of steps that accumulate, scale and change the batch; lines; bytes."""
    net = made(mesh, strategy, options, compiling)
    before = net.mesh.traffic.bytes_total
    values = values_of_steps(net, batch, ((8, 1.0), (8, 2.0), (6, 1.0)))
    net.eval()
    with torch.no_grad():
        values.append(net(*batch(net)))
    return [*values, *net.full_state_dict().values()], told(net), net.mesh.traffic.bytes_total - before


def differences(cases: list[tuple[Mesh, str, Options]], compiling: bool | str, tolerance: float) -> dict[str, Any]:
    """By case: the largest difference, lines that were told, and bytes, where they are not as they should be."""
    found = {}
    for mesh, strategy, options in cases:
        expected, _, sent = trained(mesh, strategy, options, False)
        values, lines, sent_compiled = trained(mesh, strategy, options, compiling)
        pairs = list(zip(expected, values, strict=True))
        worst = max(float((a - b).abs().max()) for a, b in pairs)
        same = all(torch.equal(a, b) for a, b in pairs) if tolerance == 0 else worst < tolerance
        if not same or lines or sent != sent_compiled:
            found[f"{mesh} {strategy} {options}"] = worst, lines, sent, sent_compiled
    return found


Case = tuple[Mesh, str, Options]
CASES: dict[str, list[Case]] = {
    "alone": [(Mesh(), "data", {"checkpoint": ["0", "4", "6"]})],
    "space and recomputation": [(Mesh(height=2), "spatial", {"checkpoint": ["0", "4", "6"]})],
    "channels": [(Mesh(filter=2), "filter", {})],
    "two levels": [(Mesh(data=4), "data", {"reduction": "hierarchical", "ranks_per_host": 2})],
    "samples": [(Mesh(data=2), "hybrid", {}), (Mesh(data=2), "data", {"compression": "powersgd-1"})],
}
MORE_CASES: list[Case] = [
    (Mesh(), "data", {}),
    (Mesh(data=2), "data", {}),
    (Mesh(data=2), "data", {"batchnorm": "replica"}),
    (Mesh(data=2), "data", {"reduction": "sharded"}),
    (Mesh(data=2), "data", {"reduction": "broadcast"}),
    (Mesh(data=2), "data", {"compression": "bf16"}),
    (Mesh(height=2), "spatial", {}),
    (Mesh(channel=2), "channel", {}),
]


@pytest.mark.parametrize(
    "cases", [*CASES.values(), pytest.param(MORE_CASES, marks=pytest.mark.full)], ids=[*CASES, "more"]
)
def test_a_replayed_step_equals_an_eager_one_to_the_bit(pools: Pools, cases: list[Case]) -> None:
    for ranks in sorted({mesh.size for mesh, _, _ in cases}):
        chosen = [case for case in cases if case[0].size == ranks]
        assert pools[ranks].run(differences, chosen, "eager", 0.0) == [{}] * ranks


@pytest.mark.full
@pytest.mark.parametrize("case", [(Mesh(), "data", {}), (Mesh(height=2), "spatial", {})], ids=str)
def test_a_compiled_step_equals_an_eager_one_within_rounding(pools: Pools, case: Case) -> None:
    ranks = case[0].size
    assert pools[ranks].run(differences, [case], True, 1e-10) == [{}] * ranks


class Precise(nn.Module):
    """A loss that multiplies in full precision, whatever autocast asks of others."""

    def forward(self, output: Any, target: Any) -> Any:
        del target
        with torch.autocast("cpu", enabled=False):
            return F.linear(output.float().mean((2, 3)), torch.full((3, 4), 0.37)).square().mean()


def in_full_precision(compiling: bool | str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 4, 3, padding=1), torch.randn(4, 2, 8, 8)
    net = cm.parallelize(model, cm.plan(model, x, Mesh(), "data"), Precise(), mesh=opened(Mesh()), compile=compiling)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(net.shard_input(x), net.shard_target(torch.arange(4)))
    loss.backward()
    assert told(net) == []
    return [loss.detach(), *net.full_gradients().values()]


def test_autocast_adds_no_casts_to_a_replay(pools: Pools) -> None:
    (eager,), (compiled,) = (pools[1].run(in_full_precision, compiling) for compiling in (False, "eager"))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def narrow_mean(output: Any, target: Any) -> Any:
    """A loss in the type of autocast, whose gradient is cast to it."""
    del target
    return output.mean()


def in_narrow_loss(compiling: bool | str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(4, 2, 8, 8)
    net = cm.parallelize(model, cm.plan(model, x, Mesh(), "data"), narrow_mean, mesh=opened(Mesh()), compile=compiling)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(net.shard_input(x), net.shard_target(torch.zeros(4)))
    assert loss.dtype == torch.bfloat16
    loss.backward()
    return [loss.detach(), *net.full_gradients().values()]


def test_a_loss_may_be_narrow(pools: Pools) -> None:
    (eager,), (compiled,) = (pools[1].run(in_narrow_loss, compiling) for compiling in (False, "eager"))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def rounded() -> float:
    """The largest difference that the compiler makes to the loss and the gradients of one step."""
    values = []
    for compiling in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten()).double()
        x = torch.randn(4, 2, 8, 8, dtype=torch.float64)
        net = cm.parallelize(
            model, cm.plan(model, x, Mesh(), "data"), F.mse_loss, mesh=opened(Mesh()), compile=compiling
        )
        loss = net(net.shard_input(x), net.shard_target(torch.zeros(4, 256, dtype=torch.float64)))
        loss.backward()
        assert told(net) == []
        values.append(torch.cat([loss.detach().view(1), *(g.flatten() for g in net.full_gradients().values())]))
    return float((values[0] - values[1]).abs().max())


def test_the_compiler_changes_a_step_by_rounding_alone(pools: Pools) -> None:
    (difference,) = pools[1].run(rounded)
    assert difference < 1e-12


def kinds_of_steps() -> list[int]:
    """Traced steps that are kept after each of some batches."""
    net, kept = made(Mesh(), "data", {}, "eager"), []
    engine: Any = net._running.engine
    for samples in (8, 8, 6, 4, 3, 2, 8):
        net(*batch(net, samples)).backward()
        kept.append(len(engine._steps))
    net.eval()
    net(*batch(net))
    with torch.autocast("cpu", torch.bfloat16):
        net.train()(*batch(net)).backward()
    return [*kept, len({kind[4] for kind in engine._steps})]


def test_each_kind_of_batch_is_traced_once_and_a_few_are_kept(pools: Pools) -> None:
    assert pools[1].run(kinds_of_steps) == [[1, 1, 2, 3, 4, 4, 4, 2]]


class Looking(nn.Module):
    """A loss that looks at its own value, as no graph can."""

    def forward(self, output: Any, target: Any) -> Any:
        loss = F.cross_entropy(output, target)
        return loss * 2 if loss.item() > 1e9 else loss


def fallbacks() -> list[tuple[str, bool]]:
    """For steps that cannot be traced: the warning, and whether it trained nevertheless."""
    found = []

    def step(net: ParallelNet, x: torch.Tensor, target: torch.Tensor) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                net.zero_grad()
                net(x, target).backward()
        texts = [str(w.message) for w in caught if "compile" in str(w.message)]
        assert len(texts) == 1
        found.append((texts[0], all(p.grad is not None for p in net.parameters())))

    model = small_net().double()
    plan = cm.plan(model, (8, 3, 16, 16), Mesh(), "data")
    looking = cm.parallelize(model, plan, Looking(), mesh=opened(Mesh()), compile="eager")
    step(looking, *batch(looking))
    net = made(Mesh(), "data", {}, "eager")
    x, target = batch(net)
    step(net, x.requires_grad_(), target)
    hooked = made(Mesh(), "data", {}, "eager")
    seen: list[Any] = []
    next(iter(hooked.children())).register_forward_hook(lambda *_: seen.append(1))
    step(hooked, *batch(hooked))
    assert len(seen) == 2
    return found


def test_what_cannot_be_traced_runs_eagerly_with_one_line(pools: Pools) -> None:
    ((looking, inputs, hooked),) = pools[1].run(fallbacks)
    assert looking[0].startswith("`compile`: the step cannot be traced (")
    assert inputs[0].startswith("`compile`: gradients of inputs are asked for; it runs eagerly")
    assert hooked[0].startswith("`compile`: a layer (Conv2d) has hooks")
    assert all(trains for _, trains in (looking, inputs, hooked))


WITHOUT_COMPILER = """
import torch, torch.nn.functional as F
import convmesh as cm

cm.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
net = cm.parallelize(model, cm.plan(model, (4, 4), cm.Mesh(), "data"), F.mse_loss, compile=True)
for _ in range(2):
    net(torch.ones(4, 4), torch.zeros(4, 2)).backward()
print(model[0].weight.grad is not None)
"""


@pytest.mark.full
def test_without_a_compiler_steps_are_eager(tmp_path: Path) -> None:
    """In a process of its own: torch looks for its compiler once."""
    variables = os.environ | {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "True", ended.stderr
    assert ended.stderr.count("`compile`: torch's compiler does not work here (") == 1


def wrong_use() -> None:
    net = made(Mesh(), "data", {}, "eager")
    x, target = batch(net)
    loss = net(x, target)
    loss.backward(retain_graph=True)
    with pytest.raises(ConvMeshError, match="ran a second time"):
        loss.backward()
    with pytest.raises(LabelError, match="label 9"):
        net(x, torch.full_like(target, 9))
    net(x, target).backward()
    with pytest.raises(PlanError, match=r"`compile` \(='aot'\) must be True"):
        made(Mesh(), "data", {}, "aot")


def test_mistakes_are_told_as_in_eager_steps_and_the_net_goes_on(pools: Pools) -> None:
    pools[1].run(wrong_use)


class Weighted(nn.Module):
    """A loss with a weight that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target) * self.scale


def gradients_of_a_loss(compiling: bool | str) -> torch.Tensor:
    model, loss = small_net().double(), Weighted()
    plan = cm.plan(model, (8, 3, 16, 16), Mesh(height=2), "spatial")
    net = cm.parallelize(model, plan, loss, mesh=opened(Mesh(height=2)), compile=compiling)
    net.manual_seed(3)
    net(*batch(net)).backward()
    assert loss.scale.grad is not None
    return loss.scale.grad


def test_a_loss_learns_too(pools: Pools) -> None:
    assert pools[2].run(gradients_of_a_loss, "eager") == pools[2].run(gradients_of_a_loss, False)


def stepwise(compiling: bool | str) -> list[torch.Tensor]:
    """Float16 with a scaler: gradients are computed with the scale, as they must be."""
    model = small_net(0.0).float()
    plan = cm.plan(model, (8, 3, 16, 16), Mesh(data=2), "data")
    net = cm.parallelize(model, plan, F.cross_entropy, mesh=opened(Mesh(data=2)), compile=compiling)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), cm.GradScaler("cpu", init_scale=2.0**8)
    x, target = batch(net)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x.float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told(net) == []
    return [p.detach() for p in net.parameters()]


def test_scaling_and_autocast_are_as_in_eager_steps(pools: Pools) -> None:
    for eager, compiled in zip(pools[2].run(stepwise, False), pools[2].run(stepwise, "eager"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def in_pieces(compiling: bool | str) -> tuple[list[torch.Tensor], list[int]]:
    """Gradients of a network with several buckets; sums posted when the first layer's gradient came, and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4)).double()
    x, target = torch.randn(8, 16, dtype=torch.float64), torch.arange(8) % 4
    plan = cm.plan(model, x, Mesh(data=2), "data")
    net = cm.parallelize(model, plan, F.cross_entropy, mesh=opened(Mesh(data=2)), compile=compiling)
    sent: list[int] = []
    first = next(iter(model.parameters()))
    first.register_hook(lambda _: sent.append(net.mesh.traffic.calls["all_reduce"]))
    before = net.mesh.traffic.calls["all_reduce"]
    net(net.shard_input(x), net.shard_target(target)).backward()
    sent.append(net.mesh.traffic.calls["all_reduce"])
    return list(net.full_gradients().values()), [count - before for count in sent]


def test_sums_of_gradients_start_behind_backward(pools: Pools) -> None:
    """The first layer's gradient comes last: by then the sum of the bucket before is on its way."""
    eager, compiled = pools[2].run(in_pieces, False), pools[2].run(in_pieces, "eager")
    for (expected, posted), (found, posted_compiled) in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert posted == posted_compiled
        assert posted_compiled[0] < posted_compiled[1]
        assert posted_compiled[0] > 1  # besides the loss


def piece(*runs: Any) -> BackwardPiece:
    """A piece of backward whose calls post or wait for the one transfer of a step."""
    calls = [StepCall(run, (1,), ()) if isinstance(run, Waits) else StepCall(run, (), (1,)) for run in runs]
    return BackwardPiece(calls, (), ())


def agreed(kind: str) -> Any:
    """The segments that ranks agree on, or why they do not; ranks that differ do so in where they wait."""
    post, wait, rank = Posts(Posting(lambda *_: (), None)), Waits(()), dist.get_rank()
    early, late = [piece(post, wait), piece()], [piece(post), piece(wait)]
    forward = piece(post).calls if kind == "under way" and rank == 1 else []
    pieces = late if kind == "late" or (kind == "differs" and rank == 1) else early
    calls = StepCalls(forward, pieces, (), (), (0,), (), ())
    try:
        return agreed_segments(calls, opened(Mesh(data=2)))
    except DisagreementError as error:
        return str(error)


def test_all_ranks_capture_the_same_pieces_or_none(pools: Pools) -> None:
    assert pools[2].run(agreed, "early") == [[(0,), (1,)]] * 2
    assert pools[2].run(agreed, "late") == [[(0, 1)]] * 2
    assert all("the graphs of a compiled step" in told for told in pools[2].run(agreed, "differs"))
    assert all("rank 1: a transfer is under way" in told for told in pools[2].run(agreed, "under way"))


def several_paths(compiling: bool | str) -> list[torch.Tensor]:
    """Gradients of backward passes in which a replay is not all that leads to a weight, or is watched."""
    net = made(Mesh(data=2), "data", {}, compiling)
    weights = dict(net.named_parameters())
    found: list[torch.Tensor] = []

    def keep() -> None:
        found.extend(g.clone() for g in net.full_gradients().values())
        net.zero_grad()

    (net(*batch(net)) + 1e-2 * sum(w.square().sum() for w in weights.values())).backward()
    keep()
    (net(*batch(net)) + net(*batch(net, 6))).backward()
    keep()
    net(*batch(net)).backward(inputs=[weights["0.weight"], weights["10.bias"]])
    found.extend(w.grad.clone() for w in weights.values() if w.grad is not None)
    net.zero_grad()
    found.extend(torch.autograd.grad(net(*batch(net)), list(weights.values())))
    seen: list[torch.Tensor] = []
    doubling = weights["4.weight"].register_hook(lambda gradient: 2 * gradient)
    watching = weights["4.bias"].register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    net(*batch(net)).backward()
    keep()
    doubling.remove()
    watching.remove()
    net(*batch(net)).backward()
    keep()
    return [*found, *seen]


def differing_paths() -> list[float]:
    pairs = zip(several_paths(False), several_paths("eager"), strict=True)
    return [float((a - b).abs().max()) for a, b in pairs if not torch.equal(a, b)]


def test_gradients_are_delivered_as_autograd_would(pools: Pools) -> None:
    assert pools[2].run(differing_paths) == [[], []]
