"""Tracing a training step: the runtime's own operators run once on tensors without values, and become a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
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
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.elementwise.mask_seeds import CAPACITY, seeds_from
from convmesh.ops.loss.labels import LabelNote, collecting_labels
from convmesh.private_torch import tree_flatten, tree_unflatten
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.private_torch.graph_sources import forget_source_of
from convmesh.private_torch.module_tables import Table, buffers_of, parameters_of, standing_in
from convmesh.private_torch.tracing import FakeTensorMode
from convmesh.runtime.compiled.batch_types import read_as_cast
from convmesh.runtime.compiled.layer_tags import LayerTags
from convmesh.runtime.compiled.operand_layout import lay_out_operands
from convmesh.runtime.compiled.pool_offsets import keep_offsets
from convmesh.runtime.compiled.recomputed_values import recompute_values
from convmesh.runtime.direct_engine import DirectEngine, judged
from convmesh.runtime.layer_following import Following


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
        """This rank's shards of the tensors, without autograd. Aliases are kept: there are many, in every step."""
        held = self.tensors()
        shown = [(id(t), address_of(t)) for t in held]
        if shown != self._shown:
            self._shards, self._shown = [local_of(t) for t in held], shown
        return self._shards


@dataclass(frozen=True)
class Nested:
    """A nested value whose tensors are elsewhere: `filled` puts others in their place."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(value: Any) -> tuple[Nested, list[torch.Tensor]]:
        """The structure and the local tensors of a nested value."""
        leaves, spec = tree_flatten(value)
        found = [x.local if isinstance(x, Sharded) else x for x in leaves if isinstance(x, (Sharded, torch.Tensor))]
        return Nested(tuple(map(_without_values, leaves)), spec), found

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        leaves = [leaf.filled(tensors) if isinstance(leaf, _Gap) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Gap:
    """Where a tensor was; if it was a shard, with its place on a mesh."""

    shard: tuple[Layout, OpenMesh] | None

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        return next(tensors) if self.shard is None else Sharded(next(tensors), *self.shard)


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return _Gap((leaf.layout, leaf.mesh))
    return _Gap(None) if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True)
class TracedStep:
    """`module(tangent, seeds, *held, *batch)` gives the loss, a flag for finite outputs, label notes and gradients."""

    module: fx.GraphModule
    postings: list[Posting]
    """The transfers in the graph, by number."""
    learning: tuple[int, ...]
    """Which of the held tensors have a gradient."""
    notes: list[LabelNote]
    """With tensors of the trace; a replay fills in its own."""
    masks: int
    """How many random masks a step draws."""


class _Recipe:
    """The step as a function of plain tensors; remembers what tensors cannot tell."""

    def __init__(self, engine: DirectEngine, holdings: Holdings, inputs: Nested, backward: bool) -> None:
        self._engine, self._holdings, self._inputs, self._backward = engine, holdings, inputs, backward
        self._held = holdings.tensors()
        self.learning: tuple[int, ...] = ()
        self.notes: list[LabelNote] = []
        self.masks = 0

    def __call__(self, tangent: torch.Tensor, seeds: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        parts = [_standing_for(t, value) for t, value in zip(self._held, values, strict=False)]
        inputs, targets = self._inputs.filled(iter(values[len(parts) :]))
        stand_ins = {id(t): part for t, part in zip(self._held, parts, strict=True)}
        with standing_in(self._holdings.modules, stand_ins), seeds_from(seeds) as drawn:
            with collecting_labels() as self.notes:
                loss, outputs = self._engine.step(inputs, targets)
            results = self._results(loss, outputs)  # before backward begins: forward ends with the last of them
            grads = self._gradients(loss, parts, tangent) if self._backward and loss.requires_grad else []
        self.masks = drawn.used
        return [*results, *grads]

    def _results(self, loss: torch.Tensor, outputs: Any) -> list[torch.Tensor]:
        told = [tensor for note in self.notes for tensor in (note.lowest, note.highest)]
        return [t.detach() for t in (loss, judged(outputs).finite, *told)]

    def _gradients(self, loss: torch.Tensor, parts: list[torch.Tensor], tangent: torch.Tensor) -> list[torch.Tensor]:
        asked = [i for i, part in enumerate(parts) if part.requires_grad]
        with torch.autocast(tangent.device.type, enabled=False):  # `backward` is called outside of it
            given = tangent.to(loss.dtype).reshape(loss.shape)
            found = torch.autograd.grad(loss, [parts[i] for i in asked], given, allow_unused=True)
        self.learning = tuple(i for i, grad in zip(asked, found, strict=True) if grad is not None)
        return [local_of(grad) for grad in found if grad is not None]


def trace_step(
    engine: DirectEngine, holdings: Holdings, inputs: list[Sharded], targets: Any, fuse: bool, backward: bool
) -> TracedStep:
    """The step on this rank's shards as a graph of ATen operators and transfers; nothing runs, nothing is sent.

    With `fuse`, for a compiler that fuses elementary operators; without, what an eager step runs.
    """
    structure, batch = Nested.of((inputs, targets))
    recipe = _Recipe(engine, holdings, structure, backward)
    device = engine.mesh.device
    blanks = [torch.ones((), device=device), torch.zeros(CAPACITY, dtype=torch.int64, device=device)]
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # tables that operators keep
    example = [*blanks, *holdings.shards(), *(t.detach() for t in batch)]
    values = [fake.from_tensor(t, static_shapes=True) for t in example]
    fused = fusing() if fuse else nullcontext()
    following = Following(engine, [engine.module], engine.layers, LayerTags())
    try:
        with torch.autograd.set_multithreading_enabled(False), fused, tracing_transfers() as transfers:
            module = make_fx(recipe, tracing_mode="fake")(*values)
    finally:
        following.end()
        torch.clear_autocast_cache()  # it knows weights without values
    forget_source_of(module)
    module.graph.eliminate_dead_code()
    if fuse:
        tangent, _, *given = module.graph.find_nodes(op="placeholder")
        keep_offsets(module.graph)
        recompute_values(module.graph, tangent)
        read_as_cast(given[len(given) - len(batch) :])
        lay_out_operands(module.graph)  # last: the others change formats
    module.recompile()
    forget_source_of(module)
    _refuse_hidden_weights(module)
    return TracedStep(module, transfers.postings, recipe.learning, recipe.notes, recipe.masks)


def with_values(notes: Sequence[LabelNote], tensors: Iterator[torch.Tensor]) -> list[LabelNote]:
    """What labels tell in a replay."""
    return [replace(note, lowest=next(tensors), highest=next(tensors)) for note in notes]


def _standing_for(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    leaf = as_gradient_of(tensor, local) if is_dtensor(tensor) else local
    return leaf.detach().requires_grad_(tensor.requires_grad)


def _refuse_hidden_weights(module: fx.GraphModule) -> None:
    """A tensor that the trace found by itself is a constant of the graph and gets no gradient."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"the loss reads a weight of shape {tuple(value.shape)} that is neither the network's nor its own"
            )
