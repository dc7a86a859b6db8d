"""Batches on which a network is tried: small ones first, its own extents last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from convmesh.graph.graph import Graph, Shape

Shapes = tuple[Shape, ...]

SAMPLES = 2
"""Enough for batch statistics, and to show a mistake that mixes samples."""

ENOUGH = 1 << 19
"""Activations of a step that takes a moment: no need for fewer."""

MOST_KEPT = 1 << 27
"""Activations that a step with gradients may keep: half a gigabyte in float32."""

MOST_COMPUTED = 1 << 28
"""Activations that forward alone may compute if no step with gradients is small enough."""


LEAST_ALIGNED = 8
"""Powers of two below this say nothing about what a network needs."""


FACTOR_AFTER_FAILURE = 8
"""Each try costs a copy of the weights, so a network that rejects small inputs is tried on few of them."""


class SmallBatch(NamedTuple):
    """Shapes of the inputs, and whether gradients are computed too."""

    shapes: Shapes
    with_gradients: bool = True

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def small_batches(graph: Graph, shrinks_space: bool) -> Iterator[SmallBatch]:
    """Batches that can be computed in moments, from the smallest to those of the network's own extents."""
    own = own_shapes(graph)
    few = _with_samples(own, min(SAMPLES, _samples(own)))
    sizes = [*reversed(_shrunk(graph, few) if shrinks_space else [few])]
    kept = [shapes for shapes in dict.fromkeys((*sizes, own)) if _computed(graph, shapes) <= MOST_KEPT]
    alone = [_with_samples(shapes, 1) for shapes in sizes if shapes not in kept]
    kept += [shapes for shapes in alone if _computed(graph, shapes) <= MOST_KEPT]
    yield from map(SmallBatch, kept)
    if alone and alone[-1] not in kept and _computed(graph, alone[-1]) <= MOST_COMPUTED:
        yield SmallBatch(alone[-1], with_gradients=False)


def much_larger(batches: Sequence[SmallBatch], failed: SmallBatch, own: Shapes) -> list[SmallBatch]:
    """The batches worth a try after one failed: slightly larger ones mostly fail too.

    The last one always is, and so is one that can be halved as often as the network's own.
    """
    least = FACTOR_AFTER_FAILURE * failed.elements
    aligned = [shape[1:] for shape in _aligned(own)]
    kept = [[shape[1:] for shape in batch.shapes] == aligned for batch in batches]
    return [b for b, is_kept in zip(batches, kept, strict=True) if is_kept or b.elements >= least or b is batches[-1]]


def own_shapes(graph: Graph) -> Shapes:
    """The shapes of the network's inputs, for a whole global batch."""
    return tuple(node.outputs[0].shape for node in graph.inputs)


def activations(graph: Graph) -> int:
    """Elements of everything that the network computes."""
    return sum(value.elements for node in graph.nodes for value in node.outputs)


def halved(shapes: Shapes, dims: set[int]) -> Shapes:
    """The shapes with those dims half as long, never below 1."""
    return tuple(tuple((n + 1) // 2 if dim in dims else n for dim, n in enumerate(shape)) for shape in shapes)


def _shrunk(graph: Graph, shapes: Shapes) -> list[Shapes]:
    """The shapes, and smaller ones with one spatial dim halved after the other, until one is small enough."""
    tried = [shapes]
    space = range(2, max((len(shape) for shape in shapes), default=0))
    while _computed(graph, tried[-1]) > ENOUGH:
        before = tried[-1]
        for dim in space:
            tried.append(halved(tried[-1], {dim}))
        if tried[-1] == before:
            break
    tried.append(_aligned(shapes))
    return sorted(dict.fromkeys(tried), key=lambda each: _computed(graph, each), reverse=True)


def _aligned(shapes: Shapes) -> Shapes:
    """The least extents that can be halved as often as the network's own: 96 becomes 32, as U-Nets need."""
    return tuple(shape[:2] + tuple(n & -n if n & -n >= LEAST_ALIGNED else n for n in shape[2:]) for shape in shapes)


def _computed(graph: Graph, shapes: Shapes) -> int:
    """About how many activations the network has on inputs of other shapes: they grow with the inputs."""
    own = sum(value.elements for node in graph.inputs for value in node.outputs)
    return activations(graph) * sum(math.prod(shape) for shape in shapes) // max(1, own)


def _samples(shapes: Shapes) -> int:
    return next((shape[0] for shape in shapes if shape), 1)


def _with_samples(shapes: Shapes, samples: int) -> Shapes:
    """The shapes with another number of samples. Only inputs with as many samples as the first are batches."""
    batch = _samples(shapes)
    return tuple((samples, *shape[1:]) if shape and shape[0] == batch else shape for shape in shapes)
