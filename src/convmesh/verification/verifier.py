"""`verify`: the user's own model, on one process and on the plan's mesh, compared layer by layer."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.errors import UnsupportedError
from convmesh.graph import Captured
from convmesh.graph.checking.drawn_values import cotangent
from convmesh.plans import Plan
from convmesh.testing.ranks import RankError, run_ranks
from convmesh.verification.drawn_batch import DrawnBatch, DrawTarget, Sample, as_samples
from convmesh.verification.fresh_process import in_fresh_process
from convmesh.verification.judge import Judge
from convmesh.verification.notes import mesh_notes, network_notes, shape_notes
from convmesh.verification.rank_place import RankPlace, place_of
from convmesh.verification.refusals import check_arguments, check_memory, check_sample, shape_of
from convmesh.verification.result import Verification
from convmesh.verification.shrink import Samples, Shrinker, capture_quietly, on_mesh, smaller_mesh
from convmesh.verification.single_process import WholeRun
from convmesh.verification.split_rank import run_split
from convmesh.verification.survey import unsupported
from convmesh.verification.troubles import troubles

Loss = Callable[..., Any]
Progress = Callable[[str], None]

MOST_RANKS = 8


def verify(
    model: nn.Module,
    sample: Sample,
    plan: Plan,
    *,
    loss: Loss | None = None,
    target: torch.Tensor | DrawTarget | None = None,
    steps: int = 3,
    most_ranks: int = MOST_RANKS,
    seconds_timeout: float = 600.0,
    compile: bool | str = False,  # noqa: A002 - as in `parallelize`
    device: str = "cpu",
    progress: Progress | None = None,
) -> Verification:
    """Whether `plan` trains `model` as one process does; if not, which layer differs first, and by how much.

    Trains a float64 copy for a few steps on local processes, with the smallest input that network and plan allow.
    `sample` is a tensor or shape of the global batch. With `loss`, `target` is a tensor, or draws one for the shape of
    a batch; without, backward starts from random gradients. A mesh of more than `most_ranks` ranks keeps its axes,
    shortened. `compile` is that of `parallelize`, and needs a `loss`: compiled steps are then compared by losses,
    gradients and weights. With `device="cuda"` the plan runs on the GPUs that torch sees, in float32 without TF32, and
    is compared with float64 on one CPU process; several ranks may share a GPU.
    """
    began = time.monotonic()
    check_arguments(model, loss, target, steps, most_ranks)
    if compile and loss is None and plan.pipeline is None:  # a pipeline is given a loss
        raise UnsupportedError("`compile` compiles whole steps, from the input to the loss; give `loss` and `target`.")
    samples = tuple(as_samples(sample))
    check_sample(samples, plan)
    place = place_of(device)
    job = _Job(samples, plan, loss, target, steps, seconds_timeout, compile, place, progress or _silent)
    if torch.cuda.is_available():
        # Planning ran autograd; with GPUs, a process that did so cannot fork ranks that train.
        away = replace(job, plan=replace(plan, source=None), progress=_silent)
        result: Verification = in_fresh_process(_Job.run, (away, _twin(model), most_ranks), {}, seconds_timeout)
    else:
        result = job.run(_twin(model), most_ranks)
    return replace(result, seconds=time.monotonic() - began)


@dataclass(frozen=True)
class _Job:
    samples: Samples
    plan: Plan
    loss: Loss | None
    target: Any
    steps: int
    seconds_timeout: float
    compiling: bool | str
    place: RankPlace
    progress: Progress

    def run(self, twin: nn.Module, most_ranks: int) -> Verification:
        self.progress("capturing the network")
        captured = capture_quietly(twin, self.samples, tuple(shape_of(s) for s in self.samples))
        self.plan.check(captured.graph)
        mesh = smaller_mesh(self.plan.mesh, most_ranks)
        shapes = tuple(node.outputs[0].shape for node in captured.graph.inputs)
        blank = Verification(
            mesh=mesh, plan_mesh=self.plan.mesh, shapes=shapes, plan_shapes=shapes, steps=self.steps,
            notes=(*mesh_notes(self.plan, mesh), *network_notes(captured.graph, twin, self.plan.pipeline)),
        )  # fmt: skip
        if layers := unsupported(captured, self.plan):
            return replace(blank, unsupported=layers, notes=())
        return self._compare(twin, captured, on_mesh(self.plan, mesh), blank)

    def _compare(self, twin: nn.Module, captured: Captured, plan: Plan, blank: Verification) -> Verification:
        shrinker = Shrinker(twin, self.samples, plan, captured)
        if not isinstance(self.target, torch.Tensor):
            self.progress("looking for the smallest input that is cut in the same way")
            shrinker.run()
        # The run on one process compares the captured network with the model; ranks need not do so again.
        plan = replace(plan, shapes=shrinker.shapes, source=replace(shrinker.captured, unchecked=""))
        check_memory(shrinker.captured.graph, plan)
        loss, target = self._objective(shrinker.captured, plan)
        batch = DrawnBatch(self.samples, shrinker.shapes, target, self.steps)
        blank = replace(
            blank, shapes=shrinker.shapes, notes=(*blank.notes, *shape_notes(blank.plan_shapes, shrinker.shapes))
        )
        with tempfile.TemporaryDirectory(prefix="convmesh-verify-") as folder:
            try:
                return self._train(WholeRun(twin, shrinker.captured, batch, loss), plan, blank, folder)
            except RankError as error:
                return replace(blank, failure=_failure(error, folder, shrinker.captured))

    def _objective(self, captured: Captured, plan: Plan) -> tuple[Loss | None, Any]:
        """A pipeline runs backward itself, so it needs a loss: by default the distance from random values."""
        if self.loss is not None or plan.pipeline is None:
            return self.loss, self.target
        if len(captured.graph.outputs) != 1:
            raise UnsupportedError(
                f"`model` has {len(captured.graph.outputs)} outputs and runs in a pipeline; give `loss` and `target`."
            )
        return F.mse_loss, cotangent(0, captured.graph.outputs[0])

    def _train(self, whole: WholeRun, plan: Plan, blank: Verification, folder: str) -> Verification:
        self.progress(f"training on one process: {self.steps} steps, then again to see what rounding does")
        (problem,) = self._alone(whole.record, folder)
        if problem:
            return replace(blank, failure=problem)
        (sizes,) = self._alone(whole.spread, folder, self.place.dtype)
        self.progress(f"training on {plan.mesh}: {plan.mesh.size} processes")
        sent = plan if self.place.variables is None else replace(plan, source=None)
        rest = whole.model, sent, whole.batch, whole.loss, folder, self.compiling, self.place
        ranks = self.place.run(plan.mesh.size, run_split, *rest, seconds_timeout=self.seconds_timeout)
        judge = Judge(whole.captured.graph, ranks, sizes, self.place.bounds)
        layers = judge.layers()
        notes = (*blank.notes, *judge.notes())
        return replace(blank, layers=layers, losses=judge.losses(), first=judge.first(layers), notes=notes)

    def _alone(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The reference: one process on a CPU."""
        return run_ranks(1, fn, *args, seconds_timeout=self.seconds_timeout)


def _silent(message: str) -> None:
    del message


def _twin(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU, so that the user's model stays as it is."""
    try:
        return copy.deepcopy(model).cpu().double()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"`model` cannot be copied ({type(error).__name__}: {error}); verify needs a copy."
        ) from error


def _failure(error: RankError, folder: str, captured: Captured) -> str:
    """Raise a rank's refusal here; describe any other failure with the layer that was running."""
    known = troubles(folder)
    if known and known[0].error is not None and all(type(t.error) is type(known[0].error) for t in known):
        raise known[0].error from None
    if not known:
        return str(error)
    trouble = next((t for t in known if t.error is None), known[0])
    layer = next((node.layer for node in captured.graph.nodes if node.name == trouble.node), trouble.node)
    return f"rank {trouble.rank}, {f'layer {layer!r}' if layer else 'outside of forward'}: {trouble.text}"
