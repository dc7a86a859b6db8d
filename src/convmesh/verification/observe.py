"""Watching every layer of a running network: its outputs and their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn

from convmesh.graph.checking.distance import distance
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_leaves

Slices = tuple[slice, ...]


class Key(NamedTuple):
    """Identifies a tensor of a run: the `what` of the node, weight or step called `name`."""

    what: str
    name: str
    place: int = 0
    """Its index among several outputs."""


class Notes(Protocol):
    """Takes the tensors of a run; `at` is the part of the whole tensor."""

    def note(self, key: Key, tensor: torch.Tensor, at: Slices) -> None: ...


class Recorder:
    """Keeps whole tensors in memory."""

    def __init__(self) -> None:
        self.values: dict[Key, torch.Tensor] = {}

    def note(self, key: Key, tensor: torch.Tensor, at: Slices) -> None:
        del at
        self.values[key] = tensor.detach().clone()


class Comparer:
    """Computes the distance of tensors, or of this rank's parts, from those of another run."""

    def __init__(self, values: Mapping[Key, torch.Tensor]) -> None:
        self._values = values
        self.errors: dict[Key, float] = {}

    def note(self, key: Key, tensor: torch.Tensor, at: Slices) -> None:
        if key in self._values:
            self.errors[key] = distance(tensor.detach().cpu(), self._values[key][at])

    def note_missing(self, what: str, present: set[str]) -> None:
        """Tensors of one kind that this run lacks are infinitely far away."""
        missing = (key for key in self._values if key.what == what and key.name not in present)
        self.errors |= dict.fromkeys(missing, float("inf"))


_UNSET = re.compile(r"(new_)?empty(_like)?(_\d+)?")
"""Names of nodes that return uninitialised memory."""


class Watcher:
    """Passes each node's outputs and their gradients to `notes`, the first time that the node runs."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._seen: set[str] = set()
        self.active = True
        self.running = ""
        """The node that is running, for errors to name."""

    def attach(self, module: nn.Module) -> None:
        """Watch a traced network, and the traced blocks inside."""
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                part.forward = Watched(part, self).run

    def see(self, node: str, value: Any) -> None:
        # A node that runs again does so to recompute what backward needs; uninitialised memory compares with nothing.
        if not self.active or node in self._seen or _UNSET.fullmatch(node):
            return
        self._seen.add(node)
        for index, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, Sharded) and leaf.layout.folds:
                continue  # its parts are no box of the whole; the node that takes it apart is compared
            if isinstance(leaf, Sharded):
                self._watch(node, index, leaf.local, leaf.box.slices())
            elif isinstance(leaf, torch.Tensor):
                self._watch(node, index, leaf, ())

    def _watch(self, node: str, index: int, tensor: torch.Tensor, at: Slices) -> None:
        self._notes.note(Key("output", node, index), tensor, at)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._see_gradient, Key("gradient", node, index), at))

    def _see_gradient(self, key: Key, at: Slices, gradient: torch.Tensor) -> None:
        self._notes.note(key, gradient, at)


class Watched(fx.Interpreter):
    """Runs a traced network node by node under a watcher. `instead` replaces the call of some nodes."""

    def __init__(
        self, module: fx.GraphModule, watcher: Watcher, instead: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(module)
        self._watcher, self._instead = watcher, instead or {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        self._watcher.running = n.name
        value = self._instead[n.name](super().run_node, self, n) if n.name in self._instead else super().run_node(n)
        self._watcher.see(n.name, value)
        self._watcher.running = ""
        return value
