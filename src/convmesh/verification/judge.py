"""The verdict on differences: which of them rounding does not explain, and the layer where they begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from convmesh.graph import Graph, Node
from convmesh.verification.observe import Key
from convmesh.verification.result import Culprit, Difference, Kind, LayerCheck

COARSE_TOLERANCE = 1e-4
"""For networks that compute in less than float64 by themselves."""


@dataclass(frozen=True)
class Bounds:
    """How far ranks may be from one process, relative to the size of a tensor."""

    tolerance: float = 1e-9
    rounding_margin: float = 100.0
    """How much more the order of sums may change a tensor than one changed digit does."""


NOISE = 1e-3
"""A tensor that one changed digit changes by more than this part of its size cannot be judged."""

Sizes = Mapping[Key, tuple[float, float]]
"""Each tensor's largest value, and how much a changed digit changes it."""


class Judge:
    """Compares the differences on all ranks with the effect of rounding."""

    def __init__(
        self, graph: Graph, ranks: Sequence[Mapping[Key, float]], sizes: Sizes, bounds: Bounds | None = None
    ) -> None:
        """`bounds` are those of the precision in which the ranks computed, float64 unless given."""
        self._graph, self._is_double, self._bounds = graph, computes_in_double(graph), bounds or Bounds()
        self.tolerance = self._bounds.tolerance if self._is_double else COARSE_TOLERANCE
        compared = [key for key in sizes if any(key in errors for errors in ranks)]
        self._differences = {key: self._difference(key, ranks, _scale(key, sizes), sizes[key][1]) for key in compared}
        self._by_name: dict[tuple[str, str], list[Difference]] = {}
        for key, difference in self._differences.items():
            self._by_name.setdefault((key.what, key.name), []).append(difference)

    def _difference(self, key: Key, ranks: Sequence[Mapping[Key, float]], size: float, spread: float) -> Difference:
        error, negative = max((errors.get(key, 0.0), -rank) for rank, errors in enumerate(ranks))
        allowed = max(self.tolerance, self._bounds.rounding_margin * spread / size)
        return Difference(cast("Kind", key.what), key.name, error / size, allowed, -negative)

    def layers(self) -> tuple[LayerCheck, ...]:
        """Every call in the order it runs, with its weights at the first layer that uses them."""
        owned: set[str] = set()
        checks = []
        for node in self._graph.nodes:
            mine = [*self._of(("output", "gradient"), node.name), *self._of_weights(node, owned)]
            if mine:
                checks.append(LayerCheck(node.layer, node.name, node.op, tuple(mine)))
        return tuple(checks)

    def losses(self) -> tuple[Difference, ...]:
        return tuple(d for key, d in self._differences.items() if key.what == "loss")

    def _of(self, kinds: Sequence[str], name: str) -> Iterator[Difference]:
        return (difference for kind in kinds for difference in self._by_name.get((kind, name), ()))

    def _of_weights(self, node: Node, owned: set[str]) -> Iterator[Difference]:
        for weight in node.weights:
            if weight.name not in owned:
                owned.add(weight.name)
                yield from self._of(("weight gradient", "weight"), weight.name)

    def first(self, layers: Sequence[LayerCheck]) -> Culprit | None:
        """The first difference: in forward order, then in backward order, then in the update."""
        return self._in_forward(layers) or self._in_backward(layers) or self._in_update(layers)

    def _in_forward(self, layers: Sequence[LayerCheck]) -> Culprit | None:
        failed = ((c, d) for c in layers for d in c.differences if d.kind == "output" and not d.ok)
        return next((Culprit(check.layer, str(d)) for check, d in failed), None)

    def _in_backward(self, layers: Sequence[LayerCheck]) -> Culprit | None:
        if bad := next((d for d in self.losses() if d.name == "0" and not d.ok), None):
            return Culprit("loss", str(bad))
        for check in reversed(layers):
            for d in check.differences:
                if d.kind == "gradient" and not d.ok:
                    return self._who_gave(check, d)
            for d in check.differences:
                if d.kind == "weight gradient" and not d.ok:
                    return Culprit(check.layer, str(d))
        return None

    def _who_gave(self, check: LayerCheck, bad: Difference) -> Culprit:
        """The users of an output compute its gradient; their own gradients were right."""
        users = list(dict.fromkeys(n.layer for n in self._graph.consumers(check.node) if n.takes_split)) or ["loss"]
        others = f", or that of {' or '.join(users[1:])}," if users[1:] else ""
        return Culprit(users[0], f"its backward{others} gives {check.layer} a gradient that differs by {bad.error:.2g}")

    def _in_update(self, layers: Sequence[LayerCheck]) -> Culprit | None:
        failed = ((c, d) for c in layers for d in c.differences if d.kind == "weight" and not d.ok)
        weight = next((Culprit(check.layer, str(d)) for check, d in failed), None)
        return weight or next((Culprit("loss", str(d)) for d in self.losses() if not d.ok), None)

    def notes(self) -> Iterator[str]:
        """What could not be judged."""
        if self._is_double and self._bounds != Bounds():
            yield f"ranks computed in float32, without TF32: differences up to {self.tolerance:g} are allowed"
        if not self._is_double:
            yield f"the model computes in less than float64 by itself: differences up to {self.tolerance:g} are allowed"
        vague = [key for key, d in self._differences.items() if key.what == "output" and d.allowed > 1e-3]
        if vague:
            yield (
                f"{len(vague)} layers, the first is {self._graph.node(vague[0].name).layer}, change by more than "
                "1e-5 when the input's last digit does: too sensitive to tell small mistakes from rounding"
            )


def _scale(key: Key, sizes: Sizes) -> float:
    """The size that a difference is relative to: the tensor's largest value, or that of its kind if it is noise.

    The gradient of a bias in front of a batch norm, for example, is zero but for rounding.
    """
    size, spread = sizes[key]
    if spread < NOISE * size:
        return size
    return max(other for known, (other, _) in sizes.items() if known.what == key.what)


def computes_in_double(graph: Graph) -> bool:
    """Whether all floating-point outputs of the network are float64."""
    return all(
        value.dtype == "float64"
        for node in graph.nodes
        for value in node.outputs
        if value.dtype in ("float16", "bfloat16", "float32", "float64")
    )
