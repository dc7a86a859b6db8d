"""A stage under `compile`: each kind of micro-batch is traced once, and replayed from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.runtime.compiled.fallbacks import Fallbacks
from convmesh.runtime.compiled.layer_tags import LayerTags
from convmesh.runtime.compiled.step_calls import cut_before
from convmesh.runtime.compiled.step_compiler import StepCompiler, Uncompiled, first_line, missing_compiler
from convmesh.runtime.compiled.step_kinds import KeptKinds, Uncomparable, kind_of_step
from convmesh.runtime.compiled.traced_graph import Holdings, trace_graph
from convmesh.runtime.layer_following import HasLoss, followed
from convmesh.runtime.pipeline.replayed_action import ActionRun, ReplayedAction
from convmesh.runtime.pipeline.stage_loss import StageLoss
from convmesh.runtime.pipeline.stage_modules import StageModule
from convmesh.runtime.pipeline.traced_action import ActionRecipe, MicroBatch, is_for_weights


class ActionCompiler:
    """Traces and compiles the actions of a rank's stages."""

    def __init__(self, owner: HasLoss, layers: Mapping[str, str], mesh: OpenMesh, backend: str) -> None:
        """`layers` names the layers of nodes."""
        self.tell = Fallbacks(mesh)
        self.loss_layers = [owner.loss] if isinstance(owner.loss, nn.Module) else []
        self._owner, self._layers, self.device, self._backend = owner, layers, mesh.device, backend
        self._compiler = StepCompiler(self.tell, tunes=backend == "max-autotune")

    def made(
        self, stage: StageModule, loss: StageLoss | None, holdings: Holdings, chunk: MicroBatch, splits: bool
    ) -> ReplayedAction | None:
        """The action for micro-batches of this kind; None if it stays eager."""
        compiles = self._backend != "eager"
        if compiles and (missing := missing_compiler(self.device.type)):
            self.tell(f"torch's compiler does not work here ({missing})", everywhere=True)
            return None
        try:
            recipe = ActionRecipe(stage, loss, holdings, chunk, splits)
            following = followed(self._owner, [stage.calls], self._layers, LayerTags())
            traced = recipe.described(trace_graph(recipe, self.device, following, compiles))
            self._compiler.joins = self.device.type == "cuda" and bool(traced.graph.postings)
            of_run = self._compiler.of_run if compiles else Uncompiled
            calls = cut_before(traced.graph, is_for_weights, len(traced.sources), of_run)
        except Exception as error:  # from an operator that needs values; the eager stage reports a real mistake
            self.tell(f"a stage cannot be traced ({first_line(error)})")
            return None
        return ReplayedAction(traced, calls, holdings, stage)


class CompiledStage(nn.Module):
    """Replays what a stage would do. What cannot be traced runs eagerly, and one line says why."""

    def __init__(self, eager: StageModule, loss: StageLoss | None, compiler: ActionCompiler, splits: bool) -> None:
        """`splits`: the schedule computes gradients of inputs before those of weights."""
        super().__init__()
        self.eager, self._loss, self._compiler, self._splits = eager, loss, compiler, splits
        self._holdings = Holdings([eager.calls, *(compiler.loss_layers if loss is not None else [])])
        self._actions: KeptKinds[ReplayedAction | None] = KeptKinds()
        self._runs: dict[int, ActionRun] = {}
        self._losses: dict[int, torch.Tensor] = {}

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = self.eager.chunk
        for table in (self._runs, self._losses):
            table.pop(index, None)
        chunk = MicroBatch(given, None if self._loss is None else self._loss.targets[index])
        action = self._action_for(chunk, index)
        if action is None:
            outputs: tuple[torch.Tensor, ...] = self.eager(*given)
            return outputs
        results, run = action(chunk)
        if torch.is_grad_enabled():
            self._runs[index] = run
        if self._loss is not None:
            self._losses[index] = results.pop(0)
        return tuple(results)

    def _action_for(self, chunk: MicroBatch, index: int) -> ReplayedAction | None:
        if self._loss is not None and not self._loss.shares[index]:
            return None  # no target of this micro-batch counts
        try:
            kind = kind_of_step(self._holdings, (list(chunk.given), chunk.target), self._compiler.device.type)
        except Uncomparable as reason:
            self._compiler.tell(str(reason))
            return None
        return self._actions.get_or_make(kind, lambda: self._made(chunk))

    def _made(self, chunk: MicroBatch) -> ReplayedAction | None:
        return self._compiler.made(self.eager, self._loss, self._holdings, chunk, self._splits)

    def loss_of(self, packed: Sequence[torch.Tensor], index: Any) -> torch.Tensor:
        """A micro-batch's part of the loss; it was computed with the outputs unless the stage ran eagerly."""
        assert self._loss is not None
        whole = self._losses.pop(int(index), None)
        return self._loss(packed, int(index)) if whole is None else self._loss.weighted(whole, int(index))

    def begin_backward(self, index: int, is_whole: bool) -> None:
        """A micro-batch's backward comes next: all gradients at once, or one part after the other."""
        if (run := self._runs.pop(index, None)) is not None:
            run.is_whole = is_whole or not self._splits
