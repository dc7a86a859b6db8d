"""How the layers on a mesh run a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from convmesh.plans import Plan
from convmesh.plans.plan import Attention, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What layers ask of the mesh that their inputs are on. A network's settings come from its plan."""

    overlap: bool | None = None
    """Whether convolutions start before their halos arrive; None: where it pays. True and False are for comparison."""
    sub_batches: int = 1
    """The number of parts of a batch that travel one by one to dense layers cut over the batch's own axis."""
    attention: Attention = "gather"
    """Whether ranks whose tokens are cut gather all keys and values, or pass them round a ring."""
    replica_statistics: bool = False
    """Whether batch norm takes its statistics within one data-parallel replica, not over the global batch."""
    sums_weights: bool = True
    """Whether each layer's backward sums the gradients of its weights over ranks. If not, each rank's gradients are
    its own parts, which a reducer sums."""

    precision: Precision = ""
    """The precision that dry runs assume; on devices `torch.autocast` decides."""
    compile: bool = False
    """Whether dry runs write operators out for a compiler, as the trace of a compiled step does."""

    def for_plan(self, plan: Plan) -> StepSettings:
        """The settings of a network that runs under `plan`: a reducer sums its weight gradients."""
        return replace(
            self,
            sub_batches=plan.sub_batches,
            attention=plan.attention,
            replica_statistics=plan.batchnorm == "replica",
            sums_weights=False,
            precision=plan.precision,
            compile=plan.compile,
        )

    def summing_weights(self) -> StepSettings:
        """The same, but each layer sums the gradients of its weights itself."""
        return replace(self, sums_weights=True)
