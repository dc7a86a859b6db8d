"""Search: the best plan of all, with reasons for rejecting others, and the plans train exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import InfeasibleError, PlanError, UnknownNameError
from convmesh.graph import Captured, capture
from convmesh.lowering import lower
from convmesh.oracle.search import Candidates, SearchResult
from convmesh.oracle.search.objectives import objective
from convmesh.oracle.search.why_best import why
from convmesh.planner.drafting import DraftOptions
from convmesh.planner.predicting import representatives
from convmesh.planner.scaling import scale
from convmesh.planner.searching import MIX, RESCORED, Bench, search
from convmesh.plans import STRATEGIES, Work, split_nodes
from convmesh.system import System
from convmesh.system.figure import Figure
from tests.conftest import Pools

SHAPE = (16, 3, 64, 64)


def model(wide: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(wide, 2 * wide, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * wide, 512),
        nn.ReLU(),
        nn.Linear(512, 8),
    )


def captured(shape: tuple[int, ...] = SHAPE) -> Captured:
    with torch.device("meta"):
        return capture(model(), shape)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(captured(), SHAPE, "dgx-a100", gpus=16)


def test_no_preset_on_any_mesh_is_better_than_the_best(result: SearchResult) -> None:
    net = captured()
    bench = Bench(net, System.load("dgx-a100"), cm.Assumptions(), DraftOptions())
    candidates = Candidates(net.graph, bench.alone)
    every = [candidate for strategy in STRATEGIES for candidate in candidates.of(strategy, 16)]
    legal = [candidate for candidate in every if candidates.refusal(candidate) is None]
    times = [bench.evaluate(candidate)[0].prediction.seconds_step for candidate in legal]
    assert len(times) > 5
    assert result.best.prediction.seconds_step <= min(times) * 1.02  # borders of space count for the first only


def test_plans_come_best_first_and_fit(result: SearchResult) -> None:
    times = [ranked.prediction.seconds_step for ranked in result.plans]
    assert times == sorted(times)
    assert all(ranked.mesh.size == 16 for ranked in result.plans)
    assert {ranked.strategy for ranked in result.plans} >= {"data", "data+spatial", "filter", "hybrid"}
    assert all(0 < result.efficiency(ranked) <= 1.05 for ranked in result.plans)


def test_the_first_plans_are_all_priced_at_the_borders_of_space(result: SearchResult) -> None:
    for ranked in result.plans[:RESCORED]:
        assert {*ranked.prediction.memory} >= {*representatives(ranked.mesh, borders=True)}
        assert ranked.prediction.seconds_step == cm.predict(ranked.plan, "dgx-a100").seconds_step


def test_no_mix_is_a_preset_by_another_name(result: SearchResult) -> None:
    costs = [(r.prediction.seconds_step, r.prediction.bytes_sent) for r in result.plans if r.strategy != MIX]
    mixes = [(r.prediction.seconds_step, r.prediction.bytes_sent) for r in result.plans if r.strategy == MIX]
    assert not {*costs} & {*mixes}


def test_on_one_device_all_strategies_are_one() -> None:
    alone = search(captured(), SHAPE, "dgx-a100", gpus=1)
    assert len(alone.plans) == 1
    assert alone.efficiency(alone.best) == pytest.approx(1.0)


def test_every_other_candidate_has_its_reason(result: SearchResult) -> None:
    reasons = {(one.strategy, one.mesh): one.reason for one in result.rejected}
    assert reasons["pipeline", Mesh(pipe=16)] == "pipe: 16 ranks > 4 stages"
    assert all(reasons.values())
    assert any(result.best.strategy in sentence for sentence in why(result))


def test_a_winner_that_waits_says_for_what() -> None:
    by_filters = search(captured(), SHAPE, "l40s-pcie", gpus=4, strategies=["filter"])
    parts = by_filters.best.prediction.parts
    assert parts.exposed.value > 0.1 * parts.step.value
    (told,) = [sentence for sentence in why(by_filters) if sentence.startswith("most of its waiting")]
    assert "along filter in forward and backward, such as at" in told


def test_the_waits_that_are_told_are_those_of_the_slowest_rank() -> None:
    """A rank between two others sends more halos than the first."""
    by_height = search(captured(), SHAPE, "l40s-pcie", gpus=3, strategies=["spatial"])
    timeline, slowest = by_height.best.prediction.timeline, by_height.best.prediction.parts.rank
    halos = "neighbour", ("height",)
    counts = {r: sum((i.kind, i.axes) == halos for i in timeline.of(r, "communication")) for r in timeline.ranks}
    assert slowest != timeline.ranks[0]
    assert counts[slowest] != counts[timeline.ranks[0]]
    (told,) = [sentence for sentence in why(by_height) if sentence.startswith("most of its waiting")]
    assert f"is for {counts[slowest]} × neighbour" in told


def test_a_last_stage_that_only_waits_for_others_is_explained() -> None:
    staged = search(captured(), SHAPE, "l40s-pcie", gpus=3, strategies=["pipeline"])
    parts, timeline = staged.best.prediction.parts, staged.best.prediction.timeline
    assert parts.exposed.value > 0
    assert not [*timeline.of(parts.rank, "communication")]
    assert why(staged)


def test_no_plan_of_the_pareto_front_is_beaten(result: SearchResult) -> None:
    front = result.pareto
    assert front
    least = min(result.plans, key=lambda ranked: ranked.prediction.bytes_memory)
    assert any(r.prediction.bytes_memory == least.prediction.bytes_memory for r in front)
    for one in front:
        mine = one.prediction
        assert not any(
            r.prediction.seconds_step < mine.seconds_step
            and r.prediction.bytes_memory < mine.bytes_memory
            and r.prediction.joules_step < mine.joules_step
            for r in result.plans
        )


def test_the_objective_decides_what_is_best() -> None:
    least = search(captured(), SHAPE, "dgx-a100", gpus=4, objective="memory", strategies=["data", "filter", "spatial"])
    held = [ranked.prediction.bytes_memory for ranked in least.plans]
    assert held == sorted(held)
    with pytest.raises(UnknownNameError, match=r"`objective` \(='tim'\) is unknown. Did you mean time"):
        search(captured(), SHAPE, "dgx-a100", gpus=2, objective="tim")
    with pytest.raises(PlanError, match="needs a price, but system 'abci' has none"):
        search(captured(), SHAPE, "abci", gpus=2, objective="cost", strategies=["data"])


def test_the_cost_counts_the_nodes_that_the_ranks_take() -> None:
    """As the energy does: with one rank a node, four ranks rent four nodes."""
    spread = cm.Assumptions(ranks_per_node=1)
    best = search(captured(), SHAPE, "dgx-a100", gpus=4, objective="cost", strategies=["data"], assumptions=spread).best
    hourly = System.load("dgx-a100").node.dollars_per_hour
    assert hourly is not None
    expected = 4 * float(hourly) * best.prediction.seconds_step / 3600
    assert objective("cost", SHAPE[0]).of(best.prediction) == pytest.approx(expected)


def small_memory(folder: Path, size: str) -> System:
    path = folder / "small.toml"
    path.write_text(
        f'summary = "little memory"\ninherits = "dgx-a100"\n[device]\nbytes_memory = "{size}"\n',
        encoding="utf-8",
    )
    return System.load(path)


def test_nothing_fits_and_says_at_which_layer(tmp_path: Path) -> None:
    system = small_memory(tmp_path, "1 MiB")
    with pytest.raises(InfeasibleError, match=r"data on Mesh\(data=2\): memory: .* > 1.0 MiB at layer"):
        search(captured(), SHAPE, system, gpus=2)


def test_plans_that_do_not_fit_recompute_or_shard(tmp_path: Path) -> None:
    with torch.device("meta"):
        deep = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid()) for _ in range(6)))
    net = capture(deep, (16, 8, 128, 128))
    bench = Bench(net, System.load("dgx-a100"), cm.Assumptions(), DraftOptions())
    needed = bench.ranked(cm.plan(net, (), Mesh(data=2), "data")).prediction.bytes_needed
    system = small_memory(tmp_path, f"{needed - 1_000_000} B")
    result = search(net, (), system, gpus=2, strategies=["data"])
    assert result.best.prediction.bytes_needed < needed - 1_000_000
    assert result.best.plan.checkpoint == ("0", "1", "2", "3", "4", "5")


def gradients(axes: dict[str, int] | None, gpus: int | None) -> Any:
    torch.manual_seed(0)
    net_model, x, target = model(4).double(), torch.randn(8, 3, 16, 16).double(), torch.arange(8) % 8
    if axes is None and gpus is None:
        loss = F.cross_entropy(net_model(x), target)
        loss.backward()
        return loss.item(), {name: p.grad for name, p in net_model.named_parameters()}
    plan = cm.plan(net_model, x, Mesh(**axes) if axes else None, gpus=gpus, system="dgx-a100")
    net = cm.parallelize(net_model, plan, loss=F.cross_entropy)
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    return loss.item(), net.full_gradients()


@pytest.mark.parametrize("axes", [{"data": 2, "height": 2}, {"data": 2, "filter": 2}, None], ids=str)
def test_plans_from_the_search_train_like_one_device(pools: Pools, axes: dict[str, int] | None) -> None:
    (expected,) = pools[1].run(gradients, None, None)
    for got in pools[4].run(gradients, axes, None if axes else 4):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_plans_from_the_search_are_saved_and_read(result: SearchResult, tmp_path: Path) -> None:
    layers = {node.layer for node in split_nodes(captured().graph)}
    for ranked in result.plans[:3]:
        ranked.plan.save(tmp_path / "plan.toml")
        read = cm.load_plan(tmp_path / "plan.toml")
        again = cm.plan(captured(), SHAPE, read.mesh, read)
        assert all(again.split(layer) == ranked.plan.split(layer) for layer in layers)


def test_a_mesh_or_a_number_of_gpus() -> None:
    with pytest.raises(PlanError, match="give `mesh`"):
        cm.plan(captured(), SHAPE)
    with pytest.raises(PlanError, match="not both"):
        cm.plan(captured(), SHAPE, Mesh(data=2), gpus=2)
    with pytest.raises(PlanError, match=r"`gpus` \(=0\) must be a positive number"):
        cm.plan(captured(), SHAPE, gpus=0)
    with pytest.raises(PlanError, match=r"`strategies` has 'dta', which is none"):
        search(captured(), SHAPE, "dgx-a100", gpus=2, strategies=["dta"])


def normed_model() -> nn.Module:
    """Its norm runs other kernels on CPUs than on GPUs."""
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1))


@pytest.fixture(scope="module")
def on_cpus() -> Captured:
    with torch.device("meta"):
        return capture(normed_model(), SHAPE)


def with_cores(count: float) -> System:
    """A system whose ranks are processes on cores."""
    known = System.load("dgx-a100")
    return replace(known, node=replace(known.node, cores=Figure(count, "", "measured", "test")))


def operators(captured: Captured, plan: cm.Plan, device: str) -> set[str]:
    nodes = lower(captured, plan, device=device).program.nodes
    return {step.op for node in nodes for step in (*node.forward, *node.backward) if isinstance(step, Work)}


def test_a_search_prices_the_operators_of_the_systems_own_kind_of_device(on_cpus: Captured) -> None:
    system = with_cores(4.0)
    result = search(on_cpus, SHAPE, system, gpus=2)
    best = result.best.plan
    assert "native_batch_norm_backward" in operators(on_cpus, best, "cpu") - operators(on_cpus, best, "cuda")
    for ranked in result.plans:
        assert ranked.prediction.seconds_step == cm.predict(ranked.plan, system).seconds_step


def test_scaling_prices_the_operators_of_the_systems_own_kind_of_device(on_cpus: Captured) -> None:
    system = with_cores(4.0)
    scaling = scale(lambda _: on_cpus, system, [1, 2], ["data", "spatial", "pipeline"])
    points = [point.ranked for curve in scaling.curves for point in curve.points if point.ranked]
    assert len(points) >= 4
    for ranked in points:
        assert ranked.prediction.seconds_step == cm.predict(ranked.plan, system).seconds_step


def test_a_mesh_without_processes_knows_the_device_that_it_stands_for() -> None:
    x = torch.empty(2, 3, device="meta")
    assert cm.dry_mesh(Mesh(data=2), device="cpu").device_kind(x) == "cpu"
    assert cm.dry_mesh(Mesh(data=2)).device_kind(x) == "cuda"
    assert cm.dry_mesh(Mesh(data=2)).device_kind(torch.empty(2)) == "cpu"  # which has data, and is where it is


def rings_over_one_port(shared: bool) -> System:
    """Nodes of 8 devices with 10 Gbit/s between them, for a library that has rings alone, or trees too."""
    system = System.load("dgx-a100")
    inside, (network,) = system.links[:-1], system.links[-1:]
    slow = replace(
        network,
        bytes_per_second=replace(network.bytes_per_second, value=1.25e9),
        shared_by=replace(network.shared_by, value=8.0),
    )
    rings = tuple(m for m in system.collectives.methods if shared or m.algorithm == "ring")
    return replace(system, links=(*inside, slow), collectives=replace(system.collectives, methods=rings))


def test_sums_are_made_inside_nodes_first_where_rings_are_flat_and_that_is_faster() -> None:
    network, mesh = captured((64, 3, 32, 32)), Mesh(data=16)
    plan = cm.plan(network, (64, 3, 32, 32), mesh, "auto", system=rings_over_one_port(shared=False))
    assert (plan.reduction, plan.ranks_per_host) == ("hierarchical", 8)
    ring = replace(plan, reduction="bucketed", ranks_per_host=1)
    slow = rings_over_one_port(shared=False)
    assert cm.predict(plan, slow).seconds_step < cm.predict(ring, slow).seconds_step
    for system in (rings_over_one_port(shared=True), System.load("dgx-a100"), System.load("dgx-h100")):
        assert cm.plan(network, (64, 3, 32, 32), mesh, "auto", system=system).reduction == "bucketed"


def test_no_shipped_systems_library_has_rings_alone_between_nodes() -> None:
    """So searches there never look at sums inside nodes."""
    for name in System.names():
        over = {method.algorithm for method in System.load(name).collectives.over("network")}
        assert over != {"ring"}, name
