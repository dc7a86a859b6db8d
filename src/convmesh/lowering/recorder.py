"""Writing down what a dry run computes, sends and keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from convmesh.dist import OpenMesh
from convmesh.dist.traffic import Awaited, Sent
from convmesh.lowering.call_text import in_kernel_format, written
from convmesh.ops.core.probe import is_probing
from convmesh.plans import Saved, Step, Transfer, Wait, Work
from convmesh.private_torch.dispatching import TorchDispatchMode
from convmesh.private_torch.tensor_internals import memory_key

FREE = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "detach",
        "_unsafe_view", "lift_fresh", "as_strided_",
    }
)  # fmt: skip
"""Operators that touch no memory."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _WorkRecorder(TorchDispatchMode):
    """Lists the operators that run on meta tensors, views left out."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = in_kernel_format(func, args, func(*args, **(kwargs or {})))
        if not func.is_view and func.overloadpacket.__name__ not in FREE and not is_probing(args):
            self._steps.append(_work(func, args, kwargs or {}, result))
        return result


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    inputs, others = _parted((*args, *kwargs.values()))
    outputs, _ = _parted(result if isinstance(result, (list, tuple)) else (result,))
    tensors = inputs + outputs
    return Work(
        op=func.overloadpacket.__name__,
        inputs=tuple(tuple(t.shape) for t in inputs),
        outputs=tuple(tuple(t.shape) for t in outputs),
        dtype=dtype_name(tensors[0].dtype) if tensors else "",
        flops=_flops(func, args, kwargs, result),
        bytes_moved=sum(t.numel() * t.element_size() for t in tensors),
        options=others,
        call=written(func, args, kwargs),
    )


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if func.overloadpacket is torch.ops.aten.convolution_backward:
        return _backward_flops(*args)
    if func.overloadpacket is torch.ops.aten.mkldnn_convolution:
        return 2 * int(result.numel()) * int(args[1][0].numel())
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def _backward_flops(grad: Any, x: Any, weight: Any, *options: Any) -> int:
    """As much as forward for each gradient that is wanted; torch's own count passes over groups."""
    transposed, wanted = options[4], options[7]
    places = x if transposed else grad
    return 2 * int(places.numel()) * int(weight[0].numel()) * sum(map(bool, wanted[:2]))


def _parted(values: Sequence[Any]) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    """Tensors, also those in lists, and the other arguments."""
    tensors: list[torch.Tensor] = []
    others: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            tensors += [v for v in value if isinstance(v, torch.Tensor)]
        else:
            others.append(tuple(value) if isinstance(value, list) else value)
    return tensors, tuple(others)


@contextmanager
def recorded(mesh: OpenMesh) -> Iterator[list[Step]]:
    """The computations, transfers and waits inside the block, in order."""
    steps: list[Step] = []
    first = mesh.traffic.posted

    def note(event: Sent | Awaited) -> None:
        if isinstance(event, Awaited):
            steps.append(Wait(tuple(number - first for number in event.posted), event.arriving))
        else:
            steps.append(Transfer(event.carrier, event.axes, event.bytes_sent, event.peer))

    mesh.traffic.listener = note
    try:
        with _WorkRecorder(steps):
            yield steps
    finally:
        mesh.traffic.listener = None


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
        """What was kept, told apart by whose memory it is; from here on only the graph keeps it."""
        owners: dict[int, tuple[Any, int]] = {}
        for what, tensors in (("weight", weights), ("output", outputs), ("input", inputs)):
            owners |= {memory_key(t): (what, index) for index, t in enumerate(tensors)}
        kept, self._kept = self._kept, {}
        return tuple(
            Saved(*owners.get(key, ("own", index)), bytes_kept=tensor.untyped_storage().nbytes())
            for index, (key, tensor) in enumerate(kept.items())
        )
