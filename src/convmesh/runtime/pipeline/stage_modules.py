"""Stages as modules: runs of the network's calls, from plain tensors to plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from convmesh.dist import OpenMesh
from convmesh.graph import Captured
from convmesh.graph.kinds import DRAWS
from convmesh.graph.weightless import parts_of
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.parcels import Parcel, parcel_of
from convmesh.ops.core.sharded import Sharded
from convmesh.plans.pipeline_rules import own_stages
from convmesh.plans.stage_graph import StageGraph
from convmesh.private_torch.pipeline_stages import needs_every_gradient
from convmesh.runtime.executor import executable, recompute
from convmesh.runtime.graph_regions import Parts, graph_module, region
from convmesh.runtime.pipeline.idle_inputs import idle_inputs


@dataclass(frozen=True)
class StageRegion:
    """The calls of one stage on shards, with the values that they take and return, and those that cross its ends."""

    index: int
    mesh: OpenMesh
    """With the settings of the network."""
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    masks_before: int
    """The number of random masks that earlier stages draw for a micro-batch."""


def stage_regions(captured: Captured, lowered: Lowered, mesh: OpenMesh) -> list[StageRegion]:
    """This rank's stages of the lowered network."""
    assert lowered.plan.pipeline is not None
    stages = own_stages(lowered.plan.pipeline, mesh.mesh, mesh.rank)
    whole = replace(lowered, plan=replace(lowered.plan, checkpoint=()))
    module = executable(captured, whole, mesh)
    parts, row = parts_of(module), StageGraph(captured.graph)
    bounds = row.bounds(lowered.plan.pipeline.starts)
    calls = _calls_by_stage(module.graph, row, bounds)
    made = [_region(captured, mesh, stage, calls[stage], parts, row, bounds) for stage in stages]
    return [replace(one, module=_recomputing(one.module, captured, lowered, mesh)) for one in made]


def _recomputing(module: fx.GraphModule, captured: Captured, lowered: Lowered, mesh: OpenMesh) -> fx.GraphModule:
    """A stage with its recomputed blocks."""
    if not lowered.plan.checkpoint:
        return module
    parts, graph = parts_of(module), fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    recompute(graph, parts, captured, lowered.plan, mesh)
    return graph_module(parts, graph)


def _calls_by_stage(graph: fx.Graph, row: StageGraph, bounds: Sequence[int]) -> list[list[fx.Node]]:
    """The calls of every stage; a change of layout belongs to the stage of the call after it, which needs it."""
    calls: list[list[fx.Node]] = [[] for _ in itertools.pairwise(bounds)]
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        waiting.append(node)
        place = row.place.get(node.name)
        if place is not None:
            stage = next(s for s, end in enumerate(bounds[1:]) if place < end)
            calls[stage] += waiting
            waiting = []
    return calls


def _region(
    captured: Captured,
    mesh: OpenMesh,
    stage: int,
    calls: Sequence[fx.Node],
    parts: Parts,
    row: StageGraph,
    bounds: Sequence[int],
) -> StageRegion:
    part = region(parts, calls)
    return StageRegion(
        index=stage,
        mesh=mesh,
        module=part.module,
        inputs=tuple(node.name for node in part.inputs),
        outputs=tuple(node.name for node in part.outputs),
        received=_inputs(captured) if stage == 0 else row.crossing(bounds[stage]),
        masks_before=sum(node.kind in DRAWS for node in row.calls[: bounds[stage]]),
        sent=output_names(captured) if stage == len(bounds) - 2 else row.crossing(bounds[stage + 1]),
    )


def _inputs(captured: Captured) -> tuple[str, ...]:
    return tuple(node.name for node in captured.graph.inputs)


def output_names(captured: Captured) -> tuple[str, ...]:
    """The nodes whose tensors the network returns."""
    names = dict.fromkeys(captured.graph.nodes[-1].inputs)
    return tuple(name for name in names if captured.graph.node(name).outputs)


class StageModule(nn.Module):
    """One stage for micro-batches of one size: the first takes input shards, the others packed values."""

    def __init__(self, calls: StageRegion, lowered: Lowered, wire: torch.device) -> None:
        super().__init__()
        self.calls = calls.module
        self.takes = parcel_of(calls.received, lowered)
        self.gives = parcel_of(calls.sent, lowered)
        self.seeds: Sequence[int] = ()
        """One for each micro-batch's random masks."""
        self.chunk = 0
        """The number of the micro-batch that runs next."""
        self.mesh, self.wire = calls.mesh, wire
        self._region, self._numbers = calls, lowered.numbers
        self._idle: tuple[int, ...] | None = None if needs_every_gradient() else ()
        """The inputs from which nothing learns; found in the first step."""

    @property
    def index(self) -> int:
        """Its number in the pipeline."""
        return self._region.index

    @property
    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Its inputs and outputs, without data."""
        return self._input_examples(), self.gives.examples(self.mesh.rank)

    def _input_examples(self) -> tuple[torch.Tensor, ...]:
        if self._region.index > 0:
            return self.takes.examples(self.mesh.rank)
        pairs = zip(self.takes.shapes(self.mesh.rank), self.takes.dtypes, strict=True)
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.seeded():
            return self.run(given, self.wire)

    def run(self, given: Sequence[torch.Tensor], wire: torch.device) -> tuple[torch.Tensor, ...]:
        """The stage's calls; what they give is packed on the device `wire`."""
        known: dict[str, Any] = dict(zip(self.takes.names, self._received(given), strict=True))
        results = self.calls(*(known[name] if name in known else self._numbers[name] for name in self._region.inputs))
        known |= zip(self._region.outputs, results, strict=True)
        sent = [known[name] for name in self.gives.names]
        return self.gives.pack(sent, wire, self._idle_of(given, sent))

    def _idle_of(self, given: Sequence[torch.Tensor], sent: Sequence[Sharded]) -> tuple[torch.Tensor, ...]:
        if not torch.is_grad_enabled():
            return ()
        if self._idle is None:
            self._idle = idle_inputs([value.local for value in sent], given)
        return tuple(given[at] for at in self._idle)

    def _received(self, given: Sequence[torch.Tensor]) -> list[Sharded]:
        if self._region.index > 0:
            return self.takes.unpack(given, self.mesh)
        return [Sharded(x, layout, self.mesh) for x, layout in zip(given, self.takes.layouts, strict=True)]

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Draw masks as if the whole network ran here on the micro-batch, so that the cut into stages changes none."""
        if not self.seeds:
            yield
            return
        before = self.mesh.seeds.get_state()
        self.mesh.seeds.manual_seed(self.seeds[self.chunk])
        for _ in range(self._region.masks_before):
            torch.randint(1 << 62, (), generator=self.mesh.seeds, device="cpu")
        try:
            yield
        finally:
            self.mesh.seeds.set_state(before)


def returned(tree: Any, values: Mapping[str, Sharded], numbers: Mapping[str, Any]) -> Any:
    """The network's outputs, in their structure, from the values of its nodes."""
    known: dict[str, Any] = {**numbers, **values}
    return fx.map_arg(tree, lambda node: known[node.name])


def output_tree(captured: Captured) -> Any:
    (output,) = (node for node in captured.module.graph.nodes if node.op == "output")
    return output.args[0]


__all__ = ["Parcel", "StageModule", "StageRegion", "output_names", "output_tree", "returned", "stage_regions"]
