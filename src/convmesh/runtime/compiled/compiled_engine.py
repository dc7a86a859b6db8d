"""The engine behind `compile=True`: traces a step when it sees a new kind of batch, and replays it from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from convmesh.gradients.owners import owner_of
from convmesh.gradients.reduction import GradientReducer
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_leaves
from convmesh.runtime.compiled.fallbacks import Fallbacks
from convmesh.runtime.compiled.graphed_steps import GraphMemory
from convmesh.runtime.compiled.replayed_step import ReplayedStep
from convmesh.runtime.compiled.step_calls import cut_step
from convmesh.runtime.compiled.step_compiler import StepCompiler, Uncompiled, first_line, missing_compiler
from convmesh.runtime.compiled.step_kinds import KeptKinds, Uncomparable, kind_of_step
from convmesh.runtime.compiled.traced_graph import Holdings
from convmesh.runtime.compiled.traced_step import TracedStep, trace_step
from convmesh.runtime.direct_engine import DirectEngine


class CompiledEngine:
    """Replays traced steps. What cannot be traced runs eagerly, with the same numbers, and one line says why."""

    def __init__(self, eager: DirectEngine, backend: str) -> None:
        self.eager, self.loss, self._backend = eager, eager.loss, backend
        self._steps: KeptKinds[ReplayedStep | None] = KeptKinds()
        self._modules = [eager.module, *([eager.loss] if isinstance(eager.loss, nn.Module) else [])]
        self._holdings: Holdings | None = None
        self._tell = Fallbacks(eager.mesh)
        self._compiler = StepCompiler(self._tell, tunes=backend == "max-autotune")
        self._memory = GraphMemory(eager.mesh, self._tell)

    @property
    def told(self) -> list[str]:
        """Why something runs eagerly: the reasons reported so far."""
        return self._tell.told

    @property
    def module(self) -> nn.Module:
        return self.eager.module

    @property
    def networks(self) -> list[fx.GraphModule]:
        return self.eager.networks

    def outputs(self, inputs: list[Sharded]) -> Any:
        return self.eager.outputs(inputs)

    def rebind(self, owner: nn.Module) -> None:
        self.eager.rebind(owner)
        self._holdings = None
        self._steps.clear()

    def layout_of(self, planned: Layout) -> Layout:
        return self.eager.layout_of(planned)

    def step(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, Any]:
        step = self._step_for(inputs, targets)
        return self.eager.step(inputs, targets) if step is None else step(inputs, targets)

    def _step_for(self, inputs: list[Sharded], targets: Any) -> ReplayedStep | None:
        if self._holdings is None:
            self._holdings = Holdings(self._modules)
        batch = inputs, targets
        if any(isinstance(x, (Sharded, torch.Tensor)) and x.requires_grad for x in tree_leaves(batch)):
            self._tell("gradients of inputs are asked for")
            return None
        try:
            kind = kind_of_step(self._holdings, batch, self.eager.mesh.device.type)
        except Uncomparable as reason:
            self._tell(str(reason))
            return None
        return self._steps.get_or_make(kind, lambda: self._traced(inputs, targets))

    def _traced(self, inputs: list[Sharded], targets: Any) -> ReplayedStep | None:
        compiles = self._backend != "eager"
        device = self.eager.mesh.device.type
        if compiles and (missing := missing_compiler(device)):
            self._tell(f"torch's compiler does not work here ({missing})", everywhere=True)
            return None
        assert self._holdings is not None
        try:
            traced = trace_step(self.eager, self._holdings, inputs, targets, compiles, torch.is_grad_enabled())
            self._compiler.joins = device == "cuda" and bool(traced.graph.postings)
            calls = cut_step(traced.graph, self._order(traced), self._compiler.of_run if compiles else Uncompiled)
        except Exception as error:  # from an operator that needs values; the eager step reports a real mistake
            self._tell(f"the step cannot be traced ({first_line(error)})")
            return None
        return ReplayedStep(traced, calls, self._holdings, self._memory)

    def _order(self, traced: TracedStep) -> list[list[int]]:
        """The step's gradients by the buckets in which they are summed, in the order of the buckets."""
        assert self._holdings is not None
        held = self._holdings.tensors()
        numbers = {id(held[place]): number for number, place in enumerate(traced.learning)}
        owners = {id(o): o for p in numbers for o in [owner_of(held[traced.learning[numbers[p]]])] if o is not None}
        buckets = [b for o in owners.values() if isinstance(o, GradientReducer) for b in o.buckets]
        return [[numbers[id(s.parameter)] for s in bucket.slots if id(s.parameter) in numbers] for bucket in buckets]
