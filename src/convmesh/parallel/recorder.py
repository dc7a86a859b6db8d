"""Writing down what a dry run computes, sends and keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from convmesh.dist import OpenMesh
from convmesh.dist.traffic import Sent
from convmesh.plan import Saved, Step, Transfer, Work

_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "lift_fresh"}
)
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
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _FREE:
            self._steps.append(_work(func, args, kwargs or {}, result))
        return result


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    inputs, others = _parted((*args, *kwargs.values()))
    outputs, _ = _parted(result if isinstance(result, (list, tuple)) else (result,))
    count = flop_registry.get(func.overloadpacket)
    tensors = inputs + outputs
    return Work(
        op=func.overloadpacket.__name__,
        inputs=tuple(tuple(t.shape) for t in inputs),
        outputs=tuple(tuple(t.shape) for t in outputs),
        dtype=dtype_name(tensors[0].dtype) if tensors else "",
        flops=int(count(*args, **kwargs, out_val=result)) if count else 0,
        bytes_moved=sum(t.numel() * t.element_size() for t in tensors),
        options=others,
    )


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
    """The computations and transfers inside the block, in order."""
    steps: list[Step] = []

    def note(sent: Sent) -> None:
        steps.append(Transfer(sent.carrier, sent.axes, sent.bytes_sent, sent.peer))

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
        self._kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def listed(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> tuple[Saved, ...]:
        """What was kept, told apart by whose memory it is."""
        owners: dict[int, tuple[Any, int]] = {}
        for what, tensors in (("weight", weights), ("output", outputs), ("input", inputs)):
            owners |= {t.untyped_storage()._cdata: (what, index) for index, t in enumerate(tensors)}
        return tuple(
            Saved(*owners.get(key, ("own", index)), bytes_kept=tensor.untyped_storage().nbytes())
            for index, (key, tensor) in enumerate(self._kept.items())
        )
