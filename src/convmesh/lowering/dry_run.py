"""Running one call of the network dry: on one rank of a mesh, forward and backward, on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import ConvMeshError
from convmesh.kernels.fusing import fusing
from convmesh.layout import Mesh
from convmesh.lowering.any_channels import any_channels
from convmesh.lowering.any_extent import APART, Extent, for_extent, has_gaps
from convmesh.lowering.dry_backward import Gradients, other_leaves, run_backward
from convmesh.lowering.dry_call import DryCall, Ready
from convmesh.lowering.dry_precision import cast_on
from convmesh.lowering.dry_values import Axes, Dry, DryResult, Strides, dry_of, lying
from convmesh.lowering.live_bytes import HeldMoments, bytes_of, owned, owned_by
from convmesh.lowering.mesh_view import MeshView
from convmesh.lowering.recent_results import RecentResults
from convmesh.lowering.recorder import SavedTensors, recorded
from convmesh.lowering.samples_apart import SamplesApart, samples_apart
from convmesh.lowering.value_flow import FlowNotes
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Held
from convmesh.plans.fused.flow import NO_FLOW
from convmesh.private_torch import flat_arguments, nested_arguments, tree_leaves
from convmesh.private_torch.meta_autocast import meta_autocast

DryRuns = RecentResults[Any, DryResult]
"""Results by what distinguishes calls, shared by the ranks, meshes and plans of one network."""


_REFUSALS = (ConvMeshError, ValueError, TypeError, LookupError, RuntimeError)
"""Errors that a call raises if it cannot be made."""


class Flat(NamedTuple):
    """A call's arguments as leaves, and their nesting, also as text."""

    leaves: Sequence[Any]
    spec: Any
    nesting: str
    gap: int | None = None
    """Elements from one sample of the arriving gradient to the next, if there is a gap after each."""


class Question(NamedTuple):
    """A call on a mesh of only the axes that it uses, and what to read its result for."""

    view: MeshView
    call: DryCall
    leaves: Sequence[Any]
    spec: Any
    arriving: tuple[Strides | None, ...]
    given: Any
    """What the result depends on apart from the call."""
    wanted: Extent | None
    """The extent for which to read the result of a call on `MANY`."""

    @property
    def key(self) -> Any:
        return self.call.key, self.given


_MET = DryResult(None, (), (), (), ())
"""Stands in for the result of a call that was met but not run."""


class DryRunner:
    """Runs calls on one rank of a mesh. A call like an earlier one, on any mesh or rank, is not run again.

    A call runs on a mesh of only those axes that cut its tensors or weights: the other axes change nothing but the
    numbers of the ranks that messages go to.
    """

    def __init__(self, mesh: OpenMesh, known: DryRuns | None = None) -> None:
        self.mesh = mesh
        self.splits_backward = False
        """Whether gradients of weights are computed separately from those of inputs, as some pipeline schedules do."""
        self._known = DryRuns() if known is None else known
        self._views: dict[tuple[frozenset[str], bool], MeshView] = {}
        self._here: dict[Any, DryResult] = {}

    def run(self, call: DryCall, args: Any, arriving: tuple[Strides | None, ...] = ()) -> DryResult:
        """The result of a call on `args` = (args, kwargs), with `Dry` in place of tensors.

        `arriving` gives the strides of the outputs' gradients, where they differ from the outputs' own.
        """
        leaves, spec, nesting = flat_arguments(*args)
        if call.key is None:
            return _written_for(self.mesh, call.ready(), leaves, spec, arriving, self.splits_backward)
        named = _named(leaves)
        signature = (call.key, nesting, self.splits_backward, arriving, *named)
        if signature not in self._here:
            first = self._here.get((call.key, nesting, self.splits_backward, (), *named)) if arriving else None
            gap = None if first is None else self._gap(first, arriving)
            self._here[signature] = self._by_samples(call, args, Flat(leaves, spec, nesting, gap), arriving)
        return self._here[signature]

    def _gap(self, first: DryResult, arriving: tuple[Strides | None, ...]) -> int | None:
        """The gap in the gradient of the only output, whose shape is known from the call's first run."""
        if len(arriving) != 1 or arriving[0] is None or not isinstance(first.value, Dry):
            return None
        shape = first.value.layout.box(self.mesh.rank).shape
        return arriving[0][0] if has_gaps(shape, arriving[0]) else None

    def _by_samples(self, call: DryCall, args: Any, flat: Flat, arriving: tuple[Strides | None, ...]) -> DryResult:
        """A call's result, from a run on this rank's samples alone if possible."""
        apart = samples_apart(call, args, flat.leaves, self.mesh)
        if apart is None:
            return self._for_any(call, flat, arriving, None)
        try:
            result = self._for_any(apart.call, flat._replace(leaves=apart.leaves), arriving, apart)
        except _REFUSALS:
            return self._shared(call, flat, arriving)  # which fails too, with an error about the whole batch
        return apart.joined(result, self.mesh) if apart.keeps_cuts(result) else self._shared(call, flat, arriving)

    def _for_any(
        self, call: DryCall, flat: Flat, arriving: tuple[Strides | None, ...], apart: SamplesApart | None
    ) -> DryResult:
        """A call's result, from a run for any number of samples or channels if possible.

        Of calls that differ in channels, the first runs for any number of samples, and the second for any number of
        channels, which serves all others.
        """
        by_samples = None if apart is None else self._any_samples(apart, flat, arriving)
        if by_samples is not None and self._known.get(by_samples.key) is not None:
            with suppress(*_REFUSALS):
                return self._answer(by_samples)
        by_channels = self._any_channels(call, flat, arriving)
        if by_channels is not None and (by_samples is None or self._is_met(by_channels)):
            with suppress(*_REFUSALS):
                return self._answer(by_channels)
        with suppress(*_REFUSALS):
            if by_samples is not None:
                return self._answer(by_samples)
        return self._shared(call, flat, arriving)

    def _is_met(self, question: Question) -> bool:
        """Whether the same was asked before; also notes that it now was."""
        key = "met", question.key
        if question.key in self._known or key in self._known:
            return True
        self._known[key] = _MET
        return False

    def _any_channels(self, call: DryCall, flat: Flat, arriving: tuple[Strides | None, ...]) -> Question | None:
        """A call for any number of channels."""
        many = None if self.splits_backward or any(arriving) else any_channels(call, flat.leaves, self.mesh)
        if many is None:
            return None
        return self._question(many.call, flat._replace(leaves=many.leaves), arriving, Extent(1, many.channels))

    def _any_samples(self, apart: SamplesApart, flat: Flat, arriving: tuple[Strides | None, ...]) -> Question | None:
        """A call on this rank's samples for any number of them, and for gaps of any width between them."""
        if self.splits_backward or not all(strides is None or _begins_with_samples(strides) for strides in arriving):
            return None
        many = apart.in_any_number(self.mesh)
        if many is None:
            return None
        flat = flat._replace(leaves=many)
        if flat.gap is not None and arriving[0] is not None:
            strides = ((APART, *arriving[0][1:]),)
            return self._question(apart.call, flat, strides, Extent(0, apart.samples, flat.gap))
        return self._question(apart.call, flat, arriving, Extent(0, apart.samples))

    def _shared(self, call: DryCall, flat: Flat, arriving: tuple[Strides | None, ...]) -> DryResult:
        """The result of an earlier call like this one, or of this one, run now."""
        return self._answer(self._question(call, flat, arriving))

    def _question(
        self, call: DryCall, flat: Flat, arriving: tuple[Strides | None, ...], wanted: Extent | None = None
    ) -> Question:
        view = self._view(call, flat.leaves)
        call = call.renamed(view.names)
        seen = [view.inside(leaf) if isinstance(leaf, Dry) else leaf for leaf in flat.leaves]
        place = _place(call, seen, view.open)
        given = (view.key, place, flat.nesting, self.splits_backward, arriving, *_named(seen))
        return Question(view, call, seen, flat.spec, arriving, given, wanted)

    def _answer(self, asked: Question) -> DryResult:
        """The result of an earlier call like this one, or of this one, run now; read for the extent wanted, if any."""
        view, call, seen, spec, arriving, given, wanted = asked
        result = self._known.get(asked.key)
        if result is None:
            result = _written_for(view.open, call.ready(), seen, spec, arriving, self.splits_backward)
            self._known[call.key, given] = self._known[call.with_choice(result.decided).key, given] = result
        return view.outside(result if wanted is None else self._counted(result, wanted, view.open.mesh))

    def _counted(self, result: DryResult, wanted: Extent, mesh: Mesh) -> DryResult:
        """A result for `MANY` read once for another extent; it keeps the former alive, so that its id stays unique."""
        key = (id(result), wanted)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = for_extent(result, wanted, mesh)
        return known

    def _view(self, call: DryCall, leaves: Sequence[Any]) -> MeshView:
        used = frozenset((*call.axes, *(name for leaf in leaves if isinstance(leaf, Dry) for name in leaf.layout.axes)))
        key = used, call.uses_sub_batches
        if key not in self._views:
            settings = self.mesh.settings
            settings = settings if call.uses_sub_batches else replace(settings, sub_batches=1)
            self._views[key] = MeshView(self.mesh.with_settings(settings), used)
        return self._views[key]


def _begins_with_samples(strides: Strides) -> bool:
    """Whether samples are outermost in memory, so that no stride depends on their number."""
    return strides[0] == max(strides)


def _named(leaves: Sequence[Any]) -> list[Any]:
    return [leaf if isinstance(leaf, Dry) else _description(leaf) for leaf in leaves]


def _description(leaf: Any) -> Any:
    """Describes an argument that has no shards; torch is slow to write a tensor as text."""
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return repr(leaf)


def _place(call: DryCall, leaves: Sequence[Any], mesh: OpenMesh) -> Any:
    """What a call's result depends on apart from its arguments: the rank, or only the shapes of its shards."""
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, Dry)]
    if call.is_alike_everywhere and all(layout == layouts[0] for layout in layouts):
        return layouts[0].box(mesh.rank).shape
    return mesh.rank


def _written_for(mesh: OpenMesh, *call: Any) -> DryResult:
    """Run a call in the operators that a compiler, or torch, would run."""
    with fusing() if mesh.settings.compile else nullcontext():
        return _run(mesh, *call)


def _run(
    mesh: OpenMesh,
    ready: Ready,
    leaves: Sequence[Any],
    spec: Any,
    arriving: tuple[Strides | None, ...],
    splits_backward: bool,
) -> DryResult:
    call, weights = ready
    sum_axes: list[Axes] = []
    mesh = replace(mesh, left_partial=sum_axes)
    inputs = [leaf.on(mesh) for leaf in leaves if isinstance(leaf, Dry)]
    sources = [x.local for x in inputs]
    for x in inputs:  # a leaf of autograd must not be overwritten, as an in-place operator would
        x.local = x.local.clone() if x.local.requires_grad else x.local
    given = iter(inputs)
    args, kwargs = nested_arguments([next(given) if isinstance(leaf, Dry) else leaf for leaf in leaves], spec)
    originals, kept, storages = [x.local for x in inputs], SavedTensors(), HeldMoments("meta")
    before = storages.start((*originals, *weights))
    notes = FlowNotes(originals) if mesh.settings.compile else None
    flows = (None, None) if notes is None else (notes.forward, notes.backward)
    with recorded(mesh, storages, flows[0]) as forward, kept.hooks, meta_autocast(cast_on(mesh)):
        value = call(*args, **kwargs)
    outputs = [x.local for x in tree_leaves(value) if isinstance(x, Sharded)]
    shards = _unlisted(other_leaves(outputs, sources), weights)
    before += bytes_of(shards)
    bytes_forward, in_forward = storages.bytes_peak - before, storages.above(before)
    saved = kept.listed(originals, outputs, [*weights, *shards])
    ends = _arriving(outputs, arriving)
    if notes is not None:
        notes.turn(outputs, ends)
    back = run_backward(mesh, outputs, ends, sources, [*weights, *shards], storages, splits_backward, flows[1])
    held = Held(
        bytes_forward,
        back.bytes_peak,
        back.bytes_weights,
        outputs=owned(outputs, (("weight", weights), ("input", originals), ("output", outputs))),
        gradients=owned_by(back.gradients, (("output", ends), ("input", back.gradients))),
    )
    return DryResult(
        value=dry_of(value),
        forward=tuple(forward),
        backward=tuple(back.steps),
        saved=saved,
        sum_axes=tuple(sum_axes),
        decided=next((w.decided for w in weights if isinstance(w, PlannedWeight) and w.decided), None),
        held=held,
        weight_steps=back.weight_steps,
        gradients=tuple(None if gradient is None else gradient.stride() for gradient in back.gradients),
        moments=(in_forward, *back.moments),
        flow=NO_FLOW if notes is None else notes.flow(back.gradients),
    )


def _arriving(outputs: Sequence[torch.Tensor], strides: tuple[Strides | None, ...]) -> Gradients:
    """The gradients that reach the outputs; None for those that get none."""
    each = zip(outputs, strides or (None,) * len(outputs), strict=True)
    return [lying(tensor, order) if tensor.requires_grad else None for tensor, order in each]


def _unlisted(tensors: Sequence[torch.Tensor], listed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    known = {id(t) for t in listed}
    return [t for t in tensors if id(t) not in known]
