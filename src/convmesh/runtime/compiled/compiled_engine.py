"""The engine behind `compile=True`: traces a step when it sees a new kind of batch, and replays it from then on."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.backends import cudnn

from convmesh.dist import OpenMesh
from convmesh.gradients.owners import owner_of
from convmesh.gradients.reduction import GradientReducer
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_flatten
from convmesh.private_torch.module_tables import hooks_of
from convmesh.runtime.compiled.graphed_steps import GraphMemory
from convmesh.runtime.compiled.replayed_step import ReplayedStep
from convmesh.runtime.compiled.step_calls import cut_step
from convmesh.runtime.compiled.step_compiler import StepCompiler, Uncompiled, first_line, missing_compiler
from convmesh.runtime.compiled.traced_step import Holdings, TracedStep, trace_step
from convmesh.runtime.direct_engine import DirectEngine

STAGES_ARE_EAGER = "a pipeline's stages are not traced yet"

MOST_KEPT = 4
"""Traced steps that are kept, one for each kind of batch and mode."""


class CompiledEngine:
    """Replays traced steps. What cannot be traced runs eagerly, with the same numbers, and one line says why."""

    def __init__(self, eager: DirectEngine, backend: str) -> None:
        self.eager, self.loss, self._backend = eager, eager.loss, backend
        self._steps: OrderedDict[Hashable, ReplayedStep | None] = OrderedDict()
        self._modules = [eager.module, *([eager.loss] if isinstance(eager.loss, nn.Module) else [])]
        self._holdings: Holdings | None = None
        self._compiler = StepCompiler(self._tell, tunes=backend == "max-autotune")
        self._memory = GraphMemory(eager.mesh, self._tell)
        self.told: list[str] = []
        """The lines that said why something runs eagerly."""

    @property
    def module(self) -> nn.Module:
        return self.eager.module

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
        kind = self._kind(inputs, targets)
        if kind is None:
            return None
        if kind not in self._steps:
            self._steps[kind] = self._traced(inputs, targets)
            while len(self._steps) > MOST_KEPT:
                self._steps.popitem(last=False)
        self._steps.move_to_end(kind)
        return self._steps[kind]

    def _kind(self, inputs: list[Sharded], targets: Any) -> Hashable | None:
        """All that a traced step depends on besides values; None if it cannot be told."""
        assert self._holdings is not None
        leaves, spec = tree_flatten((inputs, targets))
        if any(isinstance(x, (Sharded, torch.Tensor)) and x.requires_grad for x in leaves):
            self._tell("gradients of inputs are asked for")
            return None
        if hooked := next((type(p).__name__ for p in self._holdings.parts if _has_hooks_of_users(p)), None):
            self._tell(f"a layer ({hooked}) has hooks, which a replay would not call")
            return None
        modes = tuple(part.training for part in self._holdings.parts)
        learning = tuple(t.requires_grad for t in self._holdings.tensors())
        device = self.eager.mesh.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        mode = autocast, torch.is_grad_enabled(), cudnn.benchmark, cudnn.deterministic
        kind = str(spec), tuple(map(_kind_of, leaves)), modes, learning, mode
        try:
            hash(kind)
        except TypeError:
            self._tell("the target holds a value that cannot be compared with that of another step")
            return None
        return kind

    def _traced(self, inputs: list[Sharded], targets: Any) -> ReplayedStep | None:
        compiles = self._backend != "eager"
        device = self.eager.mesh.device.type
        if compiles and (missing := missing_compiler(device)):
            self._tell(f"torch's compiler does not work here ({missing})")
            return None
        assert self._holdings is not None
        try:
            traced = trace_step(self.eager, self._holdings, inputs, targets, compiles, torch.is_grad_enabled())
            self._compiler.joins = device == "cuda" and bool(traced.postings)
            calls = cut_step(traced, self._order(traced), self._compiler.of_run if compiles else Uncompiled)
        except Exception as error:  # whatever an operator raises that needs values; the eager step tells a real mistake
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

    def _tell(self, reason: str) -> None:
        if reason not in self.told:
            self.told.append(reason)
            tell_fallback(self.eager.mesh, reason)


def tell_fallback(mesh: OpenMesh, reason: str) -> None:
    """One line, from the first rank alone, for what `compile` asks for and cannot have."""
    if mesh.rank == 0:
        warnings.warn(f"`compile`: {reason}; it runs eagerly, with the same numbers.", UserWarning, stacklevel=2)


def _has_hooks_of_users(part: nn.Module) -> bool:
    """Whether layers have hooks besides a reducer's, which waits for weights; the network does so before a replay."""
    return any(not getattr(hook, "__module__", "").startswith("convmesh.") for hook in hooks_of(part))


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Sharded):
        return leaf.layout, leaf.local.stride(), leaf.local.dtype
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf
