"""Recording a dry run: its computations, transfers and waits, and the tensors that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.traffic import Awaited, Sent
from convmesh.lowering.live_bytes import HeldStorages
from convmesh.lowering.operator_calls import is_view, made_call, result_of, run_call, tensors_in
from convmesh.lowering.value_flow import ValueFlow
from convmesh.ops.core.probe import Probe, is_probing
from convmesh.plans import Saved, Step, Transfer, Wait, Work
from convmesh.private_torch.dispatching import UncompiledDispatchMode
from convmesh.private_torch.dtensors import is_dtensor_type
from convmesh.private_torch.tensor_internals import memory_key


class _Recorder(UncompiledDispatchMode):
    """Lists the operators that run on meta tensors, without views, and counts the memory of their results."""

    def __init__(self, steps: list[Step], storages: HeldStorages | None, flow: ValueFlow | None) -> None:
        super().__init__()
        self._steps, self._storages, self._flow = steps, storages, flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:
            return self._run_subclasses(func, types, args, kwargs or {})
        if Probe.is_made:
            return func(*args, **(kwargs or {}))
        if is_probing(args):
            return result_of(func, args, kwargs or {})  # it has no memory in a run with data
        if is_view(func):
            return func(*args, **(kwargs or {}))  # its memory was counted with the tensor that it views
        return self._noted(*run_call(func, args, kwargs or {}), func, args, kwargs or {})

    def _run_subclasses(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Operators on tensor subclasses, which torch itself takes apart."""
        if self._storages is not None and any(is_dtensor_type(kind) for kind in types):
            return NotImplemented  # it comes again, with the tensors inside
        return self._noted(*made_call(func, args, kwargs), func, args, kwargs)

    def _noted(self, result: Any, work: Work | None, func: Any, args: Any, kwargs: Any) -> Any:
        if work is not None:
            if self._flow is not None:
                made = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
                self._flow.note(len(self._steps), func, args, tensors_in((*args, *kwargs.values())), made)
            self._steps.append(work)
        if self._storages is not None:
            self._storages.see(result if isinstance(result, (list, tuple)) else (result,))
        return result


@contextmanager
def recorded(
    mesh: OpenMesh, storages: HeldStorages | None = None, flow: ValueFlow | None = None
) -> Iterator[list[Step]]:
    """The computations, transfers and waits inside the block, in order; `storages` counts what they hold.

    `flow` notes which values the computations read and make.
    """
    steps: list[Step] = []
    first = mesh.traffic.posted

    def note(event: Sent | Awaited) -> None:
        if isinstance(event, Awaited):
            steps.append(Wait(tuple(number - first for number in event.posted), event.arriving))
        else:
            steps.append(Transfer(event.carrier, event.axes, event.bytes_sent, event.peer))

    mesh.traffic.listener, mesh.traffic.steps = note, steps
    try:
        with _Recorder(steps, storages, flow):
            yield steps
    finally:
        mesh.traffic.listener = mesh.traffic.steps = None


class SavedTensors:
    """Lists what autograd keeps for backward, each storage once."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.setdefault(memory_key(tensor), tensor)
        return tensor

    def listed(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> tuple[Saved, ...]:
        """What was kept, by whose memory it is; from here on only the graph keeps it alive."""
        owners: dict[int, tuple[Any, int]] = {}
        for what, tensors in (("weight", weights), ("output", outputs), ("input", inputs)):
            owners |= {memory_key(t): (what, index) for index, t in enumerate(tensors)}
        kept, self._kept = self._kept, {}
        return tuple(
            Saved(*owners.get(key, ("own", index)), bytes_kept=tensor.untyped_storage().nbytes())
            for index, (key, tensor) in enumerate(kept.items())
        )
