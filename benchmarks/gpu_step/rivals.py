"""What trains a case on one GPU: torch in its modes, ConvMesh in its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu_step.cases import Case
from benchmarks.gpu_step.trainings import Training, our_training, torch_training


@dataclass(frozen=True)
class Rival:
    """How a case is trained. `compiles`: ahead of the measurement; `twin`: by a process that fills the disk cache,
    because a step that captures itself must first run in its measured setting."""

    make: Callable[[Case], Training]
    compiles: bool = False
    twin: bool = False
    is_graph: bool = False
    captures: bool = False
    """Whether it becomes CUDA graphs by itself, after two steps."""
    images_only: bool = False
    """Saves launches alone, which volumes do not wait for."""

    def fits(self, case: Case) -> bool:
        return len(case.shape) == 4 or not self.images_only


FORMATS = {"": False, ", channels-last": True}

RIVALS: dict[str, Rival] = {
    **{f"torch eager{w}": Rival(partial(torch_training, last=at, mode=None)) for w, at in FORMATS.items()},
    **{
        f"torch compile{w}": Rival(partial(torch_training, last=at, mode="default"), compiles=True)
        for w, at in FORMATS.items()
    },
    **{
        f"torch {mode}{w}": Rival(
            partial(torch_training, last=at, mode=mode),
            compiles=True,
            twin=True,
            images_only=mode == "reduce-overhead",
        )
        for mode in ("reduce-overhead", "max-autotune")
        for w, at in FORMATS.items()
    },
    **{f"ConvMesh eager{w}": Rival(partial(our_training, last=at)) for w, at in FORMATS.items()},
    **{f"ConvMesh graph{w}": Rival(partial(our_training, last=at), is_graph=True) for w, at in FORMATS.items()},
    **{
        f"ConvMesh compile{w}": Rival(partial(our_training, last=at, compiling=True), compiles=True, captures=True)
        for w, at in FORMATS.items()
    },
    **{
        f"ConvMesh max-autotune{w}": Rival(
            partial(our_training, last=at, compiling="max-autotune"), compiles=True, captures=True
        )
        for w, at in FORMATS.items()
    },
    **{
        f"ConvMesh step{w}": Rival(partial(our_training, last=at, compiling=True), compiles=True, is_graph=True)
        for w, at in FORMATS.items()
    },
}
