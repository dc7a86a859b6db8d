"""Refusing a captured network that is not its model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx, nn

from convmesh.errors import CaptureError
from convmesh.graph.checking.comparison import Mismatch, first_layer, mismatch
from convmesh.graph.checking.drawn_values import Sample, drawn_input, weights_of
from convmesh.graph.checking.small_batches import SmallBatch, much_larger, own_shapes, small_batches
from convmesh.graph.checking.trial_step import StepResults, TrialStep
from convmesh.graph.graph import Graph
from convmesh.graph.unchanged_module import unchanged

SECONDS_OF_A_MOMENT = 2.0
"""In processor time. A step with gradients takes three times as long as forward, and both networks make one."""


class Verdict(NamedTuple):
    """Empty if both networks agree; else why they could not be compared, or why the captured one is refused."""

    unknown: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class CaptureCheck:
    """A captured network and what it was captured from."""

    model: nn.Module
    module: fx.GraphModule
    graph: Graph
    samples: Sequence[Sample] = ()
    """Of the global batch: tensors with or without data, or shapes."""
    follows_extents: bool = True
    """Whether the graph also holds for extents other than its own."""

    def run(self) -> str:
        """Compare one step of both: an empty string if they agree, else why they cannot be compared.

        Raises `CaptureError` if they differ. The batch is as small as both allow; as a graph may silently hold for its
        own extents alone, a difference counts only on the largest batch that can be tried.
        """
        weights = weights_of(self.model)
        if weights is None:
            return "its weights have no values here: they are on the meta device, or shards"
        verdict = Verdict(unknown="its activations are too many to be computed for a check")
        left = [*small_batches(self.graph, self.follows_extents)]
        while left:
            batch, *left = left
            latest = self.compare(self._step(weights, batch))
            if latest == Verdict():
                return ""
            verdict = latest if latest.refusal or not verdict.refusal else verdict
            left = much_larger(left, batch, own_shapes(self.graph))
        if verdict.refusal:
            raise CaptureError(verdict.refusal)
        return verdict.unknown

    def compare(self, step: TrialStep) -> Verdict:
        """Compare one step of the model with one of the captured network; neither is changed."""
        with unchanged(self.model, self.module):
            return self._compared(step)

    def _compared(self, step: TrialStep) -> Verdict:
        try:
            step = self._in_moments(step)
        except Exception as error:
            return _model_fails(step, error)
        try:
            actual = step.of(self.module)
        except Exception as error:
            return self._failed(step, error)
        try:
            expected = step.of(self.model)
        except Exception as error:
            return _model_fails(step, error)
        return self._verdict(step, actual, expected)

    def _in_moments(self, step: TrialStep) -> TrialStep:
        """The step, without gradients if they would take long.

        Runs the model once first: what a forward counts or keeps shows in its next run.
        """
        begun = time.process_time()
        forward = replace(step, with_gradients=False)
        forward.of(self.model)
        return step if time.process_time() - begun < SECONDS_OF_A_MOMENT else forward

    def _failed(self, step: TrialStep, error: Exception) -> Verdict:
        """A captured network may refuse extents other than its own; on any other failure the model may fail too."""
        if isinstance(error, CaptureError):
            if not self._has_own_extents(step):
                return Verdict(unknown=f"it does not hold for {step.batch}, and larger ones take long: {_told(error)}")
        else:
            try:
                step.of(self.model)
            except Exception as own:
                return _model_fails(step, own)
        return Verdict(refusal=f"the captured network fails on {step.batch}, the model does not: {_told(error)}")

    def _has_own_extents(self, step: TrialStep) -> bool:
        """Apart from the number of samples."""
        return [tuple(x.shape[1:]) for x in step.inputs] == [shape[1:] for shape in own_shapes(self.graph)]

    def _verdict(self, step: TrialStep, found: StepResults, expected: StepResults) -> Verdict:
        difference = mismatch(found, expected, step.device)
        if difference is None:
            return Verdict()
        if mismatch(step.of(self.model), expected, step.device) is not None:
            return self._unrepeatable()
        if self._agree_in_float64(step):
            return Verdict()
        return Verdict(refusal=self._refusal(step, difference))

    def _agree_in_float64(self, step: TrialStep) -> bool:
        """Whether the two differ by rounding alone: a gradient's terms may cancel until little else is left."""
        precise = step.in_float64()
        try:
            return mismatch(precise.of(self.module), precise.of(self.model), step.device) is None
        except Exception:  # a forward that insists on its own type
            return False

    def _unrepeatable(self) -> Verdict:
        problem = "the model computes something else each time that it runs on the same batch"
        if self.graph.opaque:  # closed layers run as they are
            return Verdict(unknown=problem)
        return Verdict(
            refusal=f"{problem}: its forward depends on what a captured network cannot see, such as a counter, or "
            "random numbers that are not torch's. Draw them with torch, and keep state in buffers."
        )

    def _refusal(self, step: TrialStep, difference: Mismatch) -> str:
        where = first_layer(step, self.module)
        return (
            f"the captured network is not the model: on {step.batch}, {difference}{f'; {where}' if where else ''}. "
            "Forward may depend on what capture cannot see, such as a counter or a global; else ConvMesh "
            f"traces this model wrongly on torch {torch.__version__}: please report it with the model's code."
        )

    def _step(self, weights: dict[str, torch.Tensor], batch: SmallBatch) -> TrialStep:
        generator = torch.Generator().manual_seed(1)
        dtypes = [getattr(torch, node.outputs[0].dtype) for node in self.graph.inputs]
        triples = zip(self.samples, batch.shapes, dtypes, strict=True)
        inputs = [drawn_input(*each, generator) for each in triples]
        return TrialStep(self.model, weights, inputs, batch.with_gradients and torch.is_grad_enabled())


def _model_fails(step: TrialStep, error: Exception) -> Verdict:
    return Verdict(unknown=f"the model itself fails on {step.batch}, and larger ones take long: {_told(error)}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
