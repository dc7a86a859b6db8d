"""A rank's step in order: nodes, buckets as their gradients arrive, the optimiser, and updated weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.simulate.priced_steps import Busy, Pricing, Script
from convmesh.oracle.simulate.rank_clocks import Join, ScriptPart
from convmesh.oracle.simulate.transfer_cuts import cut_of
from convmesh.plans.program import BucketProgram, NodeProgram, Program
from convmesh.plans.steps import Steps, Work
from convmesh.system.operator_table import Overheads

Lines = Iterator[ScriptPart | Join]
EMPTY = Script((), Estimate.exactly(0.0), Estimate.exactly(0.0))


class RankLines:
    """The lines of one rank's program."""

    def __init__(self, program: Program, pricing: Pricing) -> None:
        self.program, self._pricing = program, pricing
        self._overheads = pricing.compute.overheads
        self._takes_time = self._overheads != Overheads()
        self._beside_host = pricing.compute.works_beside_host
        self._replays = program.compile

    def whole(self) -> Lines:
        """A step without a pipeline."""
        yield self.begin()
        yield from self.sent_weights()
        yield from self.forward(self.program.nodes)
        yield self.loss()
        ready = self._ready()
        for index, parts in self._backward(self.program.nodes):
            yield from parts
            for number in ready.get(index, ()):
                yield self._leg(number, 0)
        yield from self.sums(started=[number for at in ready.values() for number in at])
        yield from self.update()

    def begin(self) -> ScriptPart:
        """Placing inputs, checking the loss, clearing gradients; the launch of graphs, where they are replayed."""
        known = self._overheads
        if self._replays and known.seconds_replay:
            learning = sum(1 for weight in self.program.weights if weight.learns)
            return self._overhead("step", known.seconds_replay + learning * known.seconds_replay_weight)
        return self._overhead("step", known.seconds_step_nodes if known.nodes else known.seconds_step)

    def loss(self) -> ScriptPart:
        """Between forward and backward, where the host may wait for the device."""
        return ScriptPart("loss", "", "forward", EMPTY, waits=self._overheads.waits_for_loss)

    def sent_weights(self) -> Lines:
        """Weights that are still on their way from the last step while the first layers run."""
        for number, shown in enumerate(self.program.shown):
            if shown.at_use:
                yield self._part(("show", number), "", "update", shown.start)

    def forward(self, nodes: Sequence[NodeProgram], *, arriving: bool = True) -> Lines:
        """Layers in order, each after its weights have arrived."""
        arrived = set() if arriving else set(range(len(self.program.shown)))
        for node in nodes:
            for number in sorted({self._chunk_of[w] for w in node.weights if w in self._chunk_of} - arrived):
                arrived.add(number)
                yield Join(("show", number))
                yield self._part(("shown", number), node.layer, "update", self.program.shown[number].finish)
            yield from self._node("forward", ("forward", node.node), node, node.forward)

    def backward(self, nodes: Sequence[NodeProgram], *, inputs: bool = True, weights: bool = True) -> Lines:
        """Gradients of inputs, of weights where they are computed separately, or both."""
        for _, parts in self._backward(nodes, inputs, weights):
            yield from parts

    def _backward(
        self, nodes: Sequence[NodeProgram], inputs: bool = True, weights: bool = True
    ) -> Iterator[tuple[int, list[ScriptPart]]]:
        again: set[str] = set()
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            parts: list[ScriptPart] = []
            if inputs and node.block and node.block not in again:
                again.add(node.block)
                for other in nodes:
                    if other.block == node.block:
                        parts += self._node("backward", ("again", other.node), other, other.forward)
            if node.weight_steps and not (inputs and weights):
                steps = node.backward_apart[0 if inputs else 1]
                parts += self._node("backward", ("backward", inputs, node.node), node, steps)
            elif inputs:
                parts += self._node("backward", ("backward", node.node), node, node.backward)
            yield index, parts

    def _node(self, phase: str, key: tuple[object, ...], node: NodeProgram, steps: Steps) -> Iterator[ScriptPart]:
        """A node's steps, and the runtime's Python overhead: compute time where the host itself computes."""
        seconds, script = self._with_host(phase, node, steps)
        if self._beside_host:
            yield ScriptPart(key, node.layer, phase, script, seconds)
            return
        if seconds and steps:
            yield replace(self._overhead(("runtime", *key), seconds), layer=node.layer, phase=phase)
        yield ScriptPart(key, node.layer, phase, script)

    def _with_host(self, phase: str, node: NodeProgram, steps: Steps) -> tuple[float, Script]:
        """The host's seconds for a node apart from launches, and its script with those; graphs need no launches."""
        script, cut = self._pricing.script(steps, self.program.rank, self._replays), cut_of(steps)
        if self._replays:
            return 0.0, script.launched()
        known = self._overheads
        if self._beside_host and cut is None:
            count, late = sum(isinstance(step, Work) for step in steps), int(phase != "forward")
            whole = known.among_others(node.kind, count, self.program.precision, late)
            if whole is not None:
                return whole, script.launched()
        takes = known.forward if phase == "forward" else known.backward
        return takes(node.kind, cut) if self._takes_time else 0.0, script

    def _overhead(self, key: Hashable, seconds: float) -> ScriptPart:
        if self._beside_host or not seconds:
            return ScriptPart(key, "", "forward", EMPTY, seconds_host=seconds)
        priced = Estimate.of(seconds * self._pricing.compute.turns, "measured", 0.2)
        return ScriptPart(key, "", "forward", Script((Busy(priced.value),), priced, Estimate.exactly(0.0)))

    def sums(self, started: Sequence[int] = ()) -> Lines:
        """The rest of the gradient sums after backward."""
        buckets = self.program.buckets
        yield from (self._leg(number, 0) for number in range(len(buckets)) if number not in set(started))
        for leg in range(1, max((len(bucket.legs) for bucket in buckets), default=0)):
            for number in range(len(buckets)):
                yield Join(("bucket", number, leg - 1))
                yield self._leg(number, leg)
        for number, bucket in enumerate(buckets):
            yield Join(("bucket", number, len(bucket.legs) - 1))

    def update(self, *, at_once: bool = False) -> Lines:
        """The optimiser, and weights sent afterwards; with `at_once` also those that layers would wait for later."""
        yield ScriptPart("update", "", "update", self._optimiser)
        now = [number for number, shown in enumerate(self.program.shown) if at_once or not shown.at_use]
        for number in now:
            yield self._part(("show", number), "", "update", self.program.shown[number].start)
        for number in now:
            yield Join(("show", number))
            yield self._part(("shown", number), "", "update", self.program.shown[number].finish)

    @cached_property
    def _optimiser(self) -> Script:
        return self._pricing.update((w.elements, w.dtype) for w in self.program.weights if w.elements)

    @property
    def optimiser(self) -> Estimate:
        return self._optimiser.compute

    @cached_property
    def _chunk_of(self) -> dict[str, int]:
        return {name: n for n, shown in enumerate(self.program.shown) if shown.at_use for name in shown.weights}

    def _ready(self) -> dict[int, list[int]]:
        """By node: the buckets that are full after its backward; buckets leave in a fixed order."""
        first: dict[str, int] = {}
        for index, node in enumerate(self.program.nodes):
            for name in node.weights:
                first.setdefault(name, index)
        ready, by_node = len(self.program.nodes) - 1, defaultdict(list)
        for number, bucket in enumerate(self.program.buckets):
            if not all(
                name in first for name in bucket.weights
            ):  # a weight that no node uses: the rest leaves at the end
                break
            ready = min(ready, _last_of(bucket, first))
            by_node[ready].append(number)
        return by_node

    def _leg(self, number: int, leg: int) -> ScriptPart:
        return self._part(("bucket", number, leg), "", "reduction", self.program.buckets[number].legs[leg])

    def _part(self, key: tuple[object, ...], layer: str, phase: str, steps: Steps) -> ScriptPart:
        return ScriptPart(key, layer, phase, self._pricing.script(steps, self.program.rank))


def _last_of(bucket: BucketProgram, first: dict[str, int]) -> int:
    """The node whose backward completes a bucket: backward ends at the first layers."""
    return min((first[name] for name in bucket.weights), default=0)
