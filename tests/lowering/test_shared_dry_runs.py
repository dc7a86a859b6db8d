"""Calls that are alike are run dry once, whatever the rank and the mesh, and find what each would find alone."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh.graph import Captured, capture
from convmesh.lowering import dry_run, lower
from convmesh.lowering.summed_axes import SummedAxes
from convmesh.plans import Program, Transfer
from convmesh.plans.summing import Reduction

SHAPE = (8, 4, 16, 16)


class Block(nn.Module):
    """Convolutions with and without halos, a norm, activations, a sum, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.thin = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.wide(x)))
        y = torch.relu(y + self.thin(y))
        out: torch.Tensor = self.head(self.pool(y).flatten(1))
        return out


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts dry runs by the mesh that they ran on."""
    counts: Counter[str] = Counter()
    run = dry_run._run

    def counted(mesh: cm.OpenMesh, *args: object) -> object:
        counts[str(mesh.mesh)] += 1
        return run(mesh, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run, "_run", counted)
    return counts


def block() -> Captured:
    return capture(Block(), SHAPE)


def lowered(captured: Captured, mesh: cm.Mesh, strategy: str, rank: int = 0) -> Program:
    return lower(captured, cm.plan(captured, SHAPE, mesh, strategy), rank).program


def test_a_plan_is_run_dry_once(runs: Counter[str]) -> None:
    captured = block()
    program = lowered(captured, cm.Mesh(height=2), "spatial")
    before = runs.total()
    assert 0 < before <= len(program.nodes)
    lowered(captured, cm.Mesh(height=2), "spatial")
    assert runs.total() == before


def test_ranks_share_what_does_not_depend_on_their_place(runs: Counter[str]) -> None:
    captured = block()
    lowered(captured, cm.Mesh(height=4), "spatial", 1)
    before = runs.total()
    lowered(captured, cm.Mesh(height=4), "spatial", 2)
    # Only the convolution with halos, the pooling and what follows it look at where a rank stands.
    assert runs.total() - before <= 5


def test_axes_that_a_call_does_not_use_do_not_matter(runs: Counter[str]) -> None:
    captured = block()
    for mesh in (cm.Mesh(height=2), cm.Mesh(height=2, filter=2)):
        cm.plan(captured, SHAPE, mesh, {"*": {"height": "height"}, "head": {}})
    assert {*runs} == {"Mesh()", "Mesh(height=2)"}
    assert runs.total() <= len(captured.graph.nodes)


def test_filter_and_channel_axes_share_their_dry_runs(runs: Counter[str]) -> None:
    captured = block()
    by_filter = lowered(captured, cm.Mesh(data=2, filter=2), "data+filter")
    before = runs.total()
    by_channel = lowered(captured, cm.Mesh(data=2, channel=2), "data+channel")
    assert runs.total() == before
    assert transfers(by_filter, "filter") == transfers(by_channel, "channel")
    assert not transfers(by_channel, "filter")


def test_a_call_that_chose_its_algorithm_is_known_under_that_name(runs: Counter[str]) -> None:
    captured, mesh = block(), cm.Mesh(filter=2)
    chosen = cm.plan(captured, SHAPE, mesh, "filter")  # says which algorithms lowering chose
    before = runs.total()
    lower(captured, chosen, 1)
    on_other_rank = runs.total() - before
    lower(captured, chosen, 0, samples=SHAPE[0])  # not the lowered plan itself, but the same calls
    assert runs.total() - before == on_other_rank


@pytest.mark.parametrize("reduction", ["bucketed", "sharded"])
@pytest.mark.parametrize(
    "mesh", [cm.Mesh(data=2, height=2), cm.Mesh(data=2, height=2, width=2), cm.Mesh(data=4)], ids=str
)
def test_sums_that_ranks_and_meshes_share_are_those_of_the_mesh_itself(
    mesh: cm.Mesh, reduction: Reduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = block()
    strategy = "data+spatial" if "height" in mesh.axes else "data"
    plan = replace(cm.plan(captured, SHAPE, mesh, strategy), reduction=reduction)
    shared = [lower(captured, plan, rank).program for rank in range(mesh.size)]
    monkeypatch.setattr(SummedAxes, "of", lambda open_mesh, *_: SummedAxes(open_mesh, {}))
    for program in shared:
        again = lower(block(), plan, program.rank).program
        assert (program.buckets, program.shown, program.bytes_buckets) == (
            again.buckets,
            again.shown,
            again.bytes_buckets,
        )
        assert program.weights == again.weights


def test_only_dense_layers_depend_on_the_number_of_sub_batches(runs: Counter[str]) -> None:
    captured = block()
    lowered(captured, cm.Mesh(data=4), "data")
    before = runs.total()
    lowered(captured, cm.Mesh(data=4), "hybrid")
    assert runs.total() - before == 1


def transfers(program: Program, axis: str) -> list[tuple[str, int]]:
    steps = [step for node in program.nodes for step in (*node.forward, *node.backward)]
    return [(step.carrier, step.bytes_sent) for step in steps if isinstance(step, Transfer) and axis in step.axes]


CASES = [
    (cm.Mesh(height=4), "spatial"),
    (cm.Mesh(data=2, height=2, width=2), "data+spatial"),
    (cm.Mesh(data=2, filter=2), "data+filter"),
    (cm.Mesh(channel=4), "channel"),
]


@pytest.mark.parametrize(("mesh", "strategy"), CASES, ids=str)
def test_shared_dry_runs_give_what_each_rank_would_find_alone(mesh: cm.Mesh, strategy: str) -> None:
    """All ranks of one network, against each rank of a network of its own."""
    shared, model = block(), Block()
    lowered(shared, cm.Mesh(channel=2), "channel")
    for rank in range(mesh.size):
        alone = capture(model, SHAPE)
        assert lowered(shared, mesh, strategy, rank) == lowered(alone, mesh, strategy, rank)
