"""Lifetimes of a program's tensors: forward and backward over its nodes, freed as the runtime frees them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from convmesh.oracle.memory.ledger import Key, Ledger
from convmesh.plans.loss_memory import LOSS, NARROW, bytes_backward, bytes_check
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.steps import Saved, bytes_each

OUTPUTS = "outputs"
"""Key of the outputs of all micro-batches, which the last stage of a pipeline copies and keeps."""


@dataclass
class NodesRun:
    """One run of some nodes: the storages of their outputs, and those that each keeps for backward."""

    tensors: dict[str, list[Key]] = field(default_factory=dict)
    kept: dict[str, list[Key]] = field(default_factory=dict)


class Liveness:
    """One pass of some of a program's nodes, forward and backward, for one (micro-)batch.

    Inputs and tensors from other stages are not counted here.
    """

    def __init__(self, program: Program, nodes: Sequence[NodeProgram], ledger: Ledger) -> None:
        self._program, self._ledger = program, ledger
        self._nodes = {node.node: node for node in nodes}
        self._uses = {source: node.node for node in nodes for source in node.sources}  # the last use of each
        self._blocks = [(block, list(run)) for block, run in itertools.groupby(nodes, lambda node: node.block)]
        self._main = NodesRun({source: [("given", source)] for source in self._uses if source not in self._nodes})
        self._gradients: dict[tuple[str, int], Key] = {}
        for key in itertools.chain.from_iterable(self._main.tensors.values()):
            ledger.hold(key, 0, "batch")
        summed = (name for bucket in program.buckets for name in bucket.weights)
        self._leaving = {*summed} if program.repeats == 1 else set()
        self._weights = {weight.name: weight.bytes_held for weight in program.weights}
        self._retains: set[str] = set()
        self._after: dict[str, list[Key]] = {}
        self._kept_by_loss = 0

    def forward(self) -> None:
        for block, nodes in self._blocks:
            for key in self._block_inputs(nodes) if block else ():
                self._ledger.again(key)
            self._forward(nodes, self._main, not block, "forward")

    def loss(self) -> None:
        """The loss keeps as many bytes as the outputs hold; without stages, the runtime then checks the outputs too."""
        outputs = dict.fromkeys(key for name in self._ends() for key in self._main.tensors[name])
        here = sum(map(self._ledger.size, outputs)) if LOSS not in self._nodes else 0
        outputs_kept = here + self._bytes_elsewhere() if here else 0
        kept = self._factor_loss() * outputs_kept
        staged = self._program.stages > 1
        self._ledger.hold(OUTPUTS, outputs_kept * self._program.repeats if staged else 0, "activations")
        self._ledger.moment("forward", "loss", kept + (self._bytes_check() if here and not staged else 0))
        self._release(key for name in self._ends() for key in self._main.tensors[name])
        self._ledger.moment("backward", "loss", bytes_backward(kept))
        self._seed(own=True)
        self._kept_by_loss = kept

    def _factor_loss(self) -> int:
        """Autocast computes losses in float32, so they keep wider copies of narrow outputs."""
        narrow = all(dtype in NARROW for name in self._ends() for dtype in self._nodes[name].dtypes)
        return 2 if self._program.precision and narrow else 1

    def _bytes_check(self) -> int:
        """Scratch bytes while this rank's outputs are checked."""
        ends = [self._nodes[name] for name in self._ends()]
        pairs = (
            pair for node in ends for pair in zip(node.bytes_outputs(self._program.rank), node.dtypes, strict=True)
        )
        return sum(bytes_check(size, dtype) for size, dtype in pairs)

    def _bytes_elsewhere(self) -> int:
        """Bytes of the outputs' channels on other ranks, which the loss gathers."""
        total = 0
        for node in map(self._nodes.__getitem__, self._ends()):
            for layout, dtype in zip(node.outputs, node.dtypes, strict=True):
                if len(layout.cuts) > 1 and layout.is_cut(1):
                    here, whole = (at.box(self._program.rank).shape for at in (layout, layout.with_whole([1])))
                    total += (math.prod(whole) - math.prod(here)) * bytes_each(dtype)
        return total

    def send(self) -> None:
        """A stage's outputs leave it; their gradients arrive in memory of their own."""
        self._release(key for name in self._ends() for key in self._main.tensors[name])
        self._seed(own=False)

    def _ends(self) -> list[str]:
        """Nodes whose outputs no other node uses: outputs of the network or of a stage."""
        return [name for name, node in self._nodes.items() if name not in self._uses and node.sources]

    def _seed(self, own: bool) -> None:
        for name in self._ends():
            sizes = [place.bytes_kept for place in self._nodes[name].held.outputs]
            for index, size in enumerate(sizes or self._nodes[name].bytes_outputs(self._program.rank)):
                self._gradients[name, index] = (name, "gradient", index)
                self._ledger.hold((name, "gradient", index), size if own else 0, "activations")

    def backward(self) -> None:
        for block, nodes in reversed(self._blocks):
            run = NodesRun(dict(self._main.tensors)) if block else self._main
            if block:
                self._forward(nodes, run, True, "recomputation")
            for node in reversed(nodes):
                self._backward(node, run)
            self._release(self._block_inputs(nodes) if block else ())

    def backward_of_input(self) -> None:
        """Compute input gradients only; what weight gradients need stays held, output gradients included."""
        self._retains = self._before_weights()
        self._ledger.hold(LOSS, self._kept_by_loss, "activations")
        self.backward()
        self._ledger.release(LOSS)

    def _before_weights(self) -> set[str]:
        """Nodes with weights, and all that they depend on: autograd's graph keeps them alive."""
        needed: set[str] = set()
        for name, node in reversed(self._nodes.items()):
            if name in needed or node.weights:
                needed |= {name, *node.sources}
        return needed

    def backward_of_weights(self) -> None:
        """After `backward_of_input`: free the rest from the first layer on; gradients live for one more layer."""
        self._retains, before = set(), 0
        for name in self._nodes:
            if name not in self._after:
                continue
            node, kept = self._nodes[name], self._after.pop(name)
            if node.weights:
                self._ledger.moment("backward", node.layer, node.held.bytes_weights + before)
                before = sum(self._weights.get(weight, 0) for weight in node.weights)
            self._hold_weight_gradients(node)
            self._release(kept)

    def _block_inputs(self, nodes: Sequence[NodeProgram]) -> list[Key]:
        inside = {node.node for node in nodes}
        sources = dict.fromkeys(s for node in nodes for s in node.sources if s not in inside)
        return [key for source in sources for key in self._main.tensors[source]]

    def _forward(self, nodes: Sequence[NodeProgram], run: NodesRun, keeps: bool, phase: str) -> None:
        """Run nodes; tensors that only they use are freed after their last use."""
        uses = self._uses if phase == "forward" else {s: node.node for node in nodes for s in node.sources}
        mine = self._nodes if phase == "forward" else {node.node for node in nodes}
        for node in nodes:
            self._ledger.moment(phase, node.layer, node.held.bytes_forward)
            self._make(node, run, (phase, node.node))
            if keeps:
                self._keep(node, run, (phase, node.node))
            for source in dict.fromkeys(node.sources):
                if source in mine and uses[source] == node.node:
                    self._release(run.tensors[source])
        if phase == "recomputation":  # nothing uses its outputs
            self._release(key for node in nodes if node.node not in uses for key in run.tensors[node.node])

    def _make(self, node: NodeProgram, run: NodesRun, key: Key) -> None:
        outputs = run.tensors[node.node] = []
        for index, place in enumerate(node.held.outputs or self._planned(node)):
            storage = self._owner(place, node, run, (key, "output", place.index))
            self._ledger.hold(storage, 0 if place.what == "weight" else place.bytes_kept, "activations")
            outputs.insert(index, storage)

    def _planned(self, node: NodeProgram) -> list[Saved]:
        """Outputs of which only the layout is known: inputs, and modules that run on real data only."""
        sizes = node.bytes_outputs(self._program.rank)
        return [Saved("output", index, size if node.sources else 0) for index, size in enumerate(sizes)]

    def _owner(self, place: Saved, node: NodeProgram, run: NodesRun, new: Key) -> Key:
        if place.what == "input" and place.index < len(node.sources):
            return run.tensors[node.sources[place.index]][0]
        outputs = run.tensors[node.node]
        return outputs[place.index] if place.what == "output" and place.index < len(outputs) else new

    def _keep(self, node: NodeProgram, run: NodesRun, key: Key) -> None:
        kept = run.kept[node.node] = []
        for place in node.saved:
            if place.what == "weight" or (place.what == "input" and place.index >= len(node.sources)):
                continue
            storage = self._owner(place, node, run, (key, "own", place.index))
            self._ledger.hold(storage, place.bytes_kept, "activations")
            kept.append(storage)

    def _backward(self, node: NodeProgram, run: NodesRun) -> None:
        arrived = [self._gradients.pop((node.node, index), None) for index in range(len(run.tensors[node.node]))]
        gradients: list[tuple[str, Key]] = []
        if any(arrived) or not node.sources:
            self._ledger.moment("backward", node.layer, node.held.bytes_backward)
            gradients = self._input_gradients(node, arrived)
            if not self._retains:
                self._hold_weight_gradients(node)
        kept = run.kept.pop(node.node, [])
        gone = [key for key in arrived if key is not None]
        if node.node in self._retains:
            self._after[node.node] = kept + (gone if node.weights else [])
            gone = [] if node.weights else gone
        else:
            self._release(kept)
        self._release(gone)
        for source, key in gradients:
            self._add_gradient(source, key, node.layer)

    def _input_gradients(self, node: NodeProgram, arrived: Sequence[Key | None]) -> list[tuple[str, Key]]:
        """Hold the gradients of the node's inputs."""
        gradients: list[tuple[str, Key]] = []
        for source, place in zip(node.sources, node.held.gradients, strict=False):
            if place is None:
                continue
            key = arrived[place.index] if place.what == "output" else (node.node, "input", place.index)
            if key is not None:
                self._ledger.hold(key, place.bytes_kept, "activations")
                gradients.append((source, key))
        return gradients

    def _add_gradient(self, source: str, key: Key, layer: str) -> None:
        """Sum as autograd does: in place if nothing else holds the sum so far."""
        before = self._gradients.setdefault((source, 0), key)
        if before is key:
            return
        if self._ledger.holders(before) > 1:
            total = self._gradients[source, 0] = (source, "sum", key)
            self._ledger.hold(total, self._ledger.size(before), "activations")
            self._ledger.moment("backward", layer)
            self._ledger.release(before)
        self._ledger.release(key)

    def _hold_weight_gradients(self, node: NodeProgram) -> None:
        """Hold the gradients that do not go straight into a bucket."""
        for name in node.weights:
            if name not in self._leaving and not self._ledger.holders(("gradient", name)):
                self._ledger.hold(("gradient", name), self._weights.get(name, 0), "gradients")

    def end(self) -> None:
        """Release gradients of tensors from other stages, and the kept outputs."""
        self._release(self._gradients.values())
        self._release([OUTPUTS] if self._ledger.holders(OUTPUTS) else ())
        self._gradients.clear()

    def _release(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            self._ledger.release(key)
