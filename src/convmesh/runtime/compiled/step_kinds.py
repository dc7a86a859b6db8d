"""Kinds of steps: all that a trace depends on except values. Each kind is traced once, and a few are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.backends import cudnn

from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_flatten
from convmesh.private_torch.module_tables import hooks_of
from convmesh.runtime.compiled.traced_graph import Holdings

MOST_KEPT = 4
"""Traces that are kept, one for each kind of batch and mode."""

Kept = TypeVar("Kept")


class Uncomparable(Exception):  # noqa: N818 - no mistake: the step runs eagerly
    """A step whose kind cannot be determined."""


class KeptKinds(OrderedDict[Hashable, Kept]):
    """What was made for each kind, the least recently used dropped first."""

    def get_or_make(self, kind: Hashable, make: Callable[[], Kept]) -> Kept:
        if kind not in self:
            self[kind] = make()
            while len(self) > MOST_KEPT:
                self.popitem(last=False)
        self.move_to_end(kind)
        return self[kind]


def kind_of_step(holdings: Holdings, batch: Any, device: str) -> Hashable:
    """The kind of a step of these layers on a batch; raises if a replay would not do what the layers do."""
    if hooked := next((type(p).__name__ for p in holdings.parts if _has_hooks_of_users(p)), None):
        raise Uncomparable(f"a layer ({hooked}) has hooks, which a replay would not call")
    leaves, spec = tree_flatten(batch)
    modes = tuple(part.training for part in holdings.parts)
    learning = tuple(t.requires_grad for t in holdings.tensors())
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    mode = autocast, torch.is_grad_enabled(), cudnn.benchmark, cudnn.deterministic
    kind = str(spec), tuple(map(_kind_of, leaves)), modes, learning, mode
    try:
        hash(kind)
    except TypeError:
        raise Uncomparable("the target holds a value that cannot be compared with that of another step") from None
    return kind


def _has_hooks_of_users(part: nn.Module) -> bool:
    """Whether a layer has hooks other than a reducer's, which wait for weights, as the network does before a replay."""
    return any(not getattr(hook, "__module__", "").startswith("convmesh.") for hook in hooks_of(part))


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Sharded):
        return leaf.layout, leaf.local.stride(), leaf.local.dtype
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf
