"""Tracing forward and backward: the runtime's own operators run once on tensors without values, and become a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh.dist import OpenMesh
from convmesh.dist.launching import Posting, tracing_transfers
from convmesh.errors import UnsupportedError
from convmesh.gradients.local_gradients import address_of, as_gradient_of, local_of
from convmesh.kernels.fusing import fusing
from convmesh.layout import Layout
from convmesh.ops.core.mask_seeds import CAPACITY, SeedInputs, seeds_from
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.labels import LabelNote
from convmesh.private_torch import tree_flatten, tree_unflatten
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.private_torch.graph_sources import forget_source_of
from convmesh.private_torch.module_tables import Table, buffers_of, parameters_of, standing_in
from convmesh.private_torch.tracing import FakeTensorMode
from convmesh.runtime.compiled.batch_types import read_as_cast
from convmesh.runtime.compiled.operand_layout import lay_out_operands
from convmesh.runtime.compiled.pool_offsets import keep_offsets
from convmesh.runtime.compiled.recomputed_values import recompute_values
from convmesh.runtime.compiled.tuned_convolutions import tune_convolutions

Tensors = Sequence[torch.Tensor]


class Holdings:
    """The tensors that a network and its loss hold, each once, looked up anew in every step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.parts = [part for module in modules for part in module.modules()]
        places: dict[int, tuple[Table, str]] = {}
        for part in self.parts:
            for table in (parameters_of(part), buffers_of(part)):
                places |= {id(t): (table, name) for name, t in table.items() if id(t) not in places}
        self._places = [(table, name) for table, name in places.values() if table[name] is not None]
        self._shards: list[torch.Tensor] = []
        self._shown: list[tuple[int, int]] = []
        """The tensors, by identity and place in memory, of which `_shards` are aliases."""

    def tensors(self) -> list[torch.Tensor]:
        return [table[name] for table, name in self._places]

    def shards(self) -> list[torch.Tensor]:
        """This rank's shards of the tensors, without autograd. Aliases are cached: every step needs many."""
        held = self.tensors()
        shown = [(id(t), address_of(t)) for t in held]
        if shown != self._shown:
            self._shards, self._shown = [local_of(t) for t in held], shown
        return self._shards


@dataclass(frozen=True)
class Nested:
    """A nested value without its tensors: `filled` puts others in their place."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(value: Any) -> tuple[Nested, list[torch.Tensor]]:
        """The structure and the local tensors of a nested value."""
        leaves, spec = tree_flatten(value)
        tensors = [x.local if isinstance(x, Sharded) else x for x in leaves if isinstance(x, (Sharded, torch.Tensor))]
        return Nested(tuple(map(_without_values, leaves)), spec), tensors

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        leaves = [leaf.filled(tensors) if isinstance(leaf, _Gap) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Gap:
    """Where a tensor was; if it was a shard, with its layout and mesh."""

    shard: tuple[Layout, OpenMesh] | None

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        return next(tensors) if self.shard is None else Sharded(next(tensors), *self.shard)


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return _Gap((leaf.layout, leaf.mesh))
    return _Gap(None) if isinstance(leaf, torch.Tensor) else leaf


class Recipe(ABC):
    """Forward and backward as a function of plain tensors; remembers what tensors cannot express."""

    def __init__(self, holdings: Holdings, tangents: Tensors, batch: Tensors) -> None:
        self._holdings, self._held = holdings, holdings.tensors()
        self.tangents, self.batch = tangents, batch
        """The shapes and types of the gradients that backward begins with; and what forward is given."""
        self.gradients = self.masks = 0
        """How many gradients it returns, and how many random masks it draws."""

    @property
    def held(self) -> list[torch.Tensor]:
        return self._holdings.shards()

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        tangents, (seeds, *given) = values[: len(self.tangents)], values[len(self.tangents) :]
        parts = [_standing_for(t, value) for t, value in zip(self._held, given, strict=False)]
        stand_ins = {id(t): part for t, part in zip(self._held, parts, strict=True)}
        with standing_in(self._holdings.modules, stand_ins), seeds_from(seeds) as drawn:
            results, gradients = self.run(parts, given[len(parts) :], tangents, drawn)
        self.gradients, self.masks = len(gradients), drawn.used
        return [*results, *gradients]

    @abstractmethod
    def run(
        self, parts: list[torch.Tensor], batch: list[torch.Tensor], tangents: Tensors, drawn: SeedInputs
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What forward computes, and the gradients; `parts` stand for the held tensors."""


@dataclass(frozen=True)
class TracedGraph:
    """`module(*tangents, seeds, *held, *batch)` gives what forward computes, and then the gradients."""

    module: fx.GraphModule
    postings: list[Posting]
    """The transfers in the graph, by number."""
    tangents: int
    gradients: int
    masks: int
    """How many random masks it draws."""


def trace_graph(
    recipe: Recipe, device: torch.device, following: AbstractContextManager[None], fuse: bool
) -> TracedGraph:
    """The recipe as a graph of ATen operators and transfers; nothing runs, nothing is sent.

    With `fuse` it suits a compiler that fuses elementary operators; without, it is what an eager step runs.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # operators keep tables
    with fake:
        tangents = [torch.empty_like(t, device=device, requires_grad=False) for t in recipe.tangents]
    seeds = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
    example = [seeds, *recipe.held, *(t.detach() for t in recipe.batch)]
    values = [*tangents, *(fake.from_tensor(t, static_shapes=True) for t in example)]
    fused = fusing() if fuse else nullcontext()
    try:
        with following, torch.autograd.set_multithreading_enabled(False), fused, tracing_transfers() as transfers:
            module = make_fx(recipe, tracing_mode="fake")(*values)
    finally:
        torch.clear_autocast_cache()  # it holds weights without values
    forget_source_of(module)
    drop_detaching(module.graph)
    module.graph.eliminate_dead_code()
    if fuse:
        _for_a_compiler(module.graph, recipe)
    module.recompile()
    forget_source_of(module)
    _refuse_hidden_weights(module)
    return TracedGraph(module, transfers.postings, len(recipe.tangents), recipe.gradients, recipe.masks)


def drop_detaching(graph: fx.Graph) -> None:
    """Remove detaching, which a traced step, without autograd, does not need; torch 2.15 writes it as an alias."""
    for target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _for_a_compiler(graph: fx.Graph, recipe: Recipe) -> None:
    given = graph.find_nodes(op="placeholder")
    keep_offsets(graph)
    recompute_values(graph, *given[: len(recipe.tangents)])
    read_as_cast(given[len(given) - len(recipe.batch) :])
    lay_out_operands(graph)  # after those that change formats
    tune_convolutions(graph)


def with_values(notes: Sequence[LabelNote], tensors: Iterator[torch.Tensor]) -> list[LabelNote]:
    """The label notes, with a replay's values."""
    return [replace(note, lowest=next(tensors), highest=next(tensors)) for note in notes]


def told_of(notes: Sequence[LabelNote]) -> list[torch.Tensor]:
    """The tensors of the label notes, as outputs of a trace."""
    return [tensor for note in notes for tensor in (note.lowest, note.highest)]


def _standing_for(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    leaf = as_gradient_of(tensor, local) if is_dtensor(tensor) else local
    return leaf.detach().requires_grad_(tensor.requires_grad)


def _refuse_hidden_weights(module: fx.GraphModule) -> None:
    """Refuse weights that the trace found by itself: they are constants of the graph and get no gradient."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"the loss reads a weight of shape {tuple(value.shape)} that is neither the network's nor its own"
            )
