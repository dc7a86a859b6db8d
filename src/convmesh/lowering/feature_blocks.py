"""The number of equal blocks in which the features of a dense layer are read by what follows it.

A fused projection makes queries, keys and values at once, a gated layer its values and gates. Cut in one run, the first
rank would have queries and half of the keys; cut block by block, every rank has the same heads of each.
"""

from __future__ import annotations

from convmesh.graph import Graph, Node

RESHAPES = frozenset({"view", "reshape", "unflatten"})
PIECES = frozenset({"chunk", "split", "tensor_split", "split_with_sizes"})


def feature_blocks(graph: Graph, node: Node, ranks: int) -> int:
    """The number of blocks, if all readers see the same ones and each divides over the ranks; else 1."""
    readers = [reader for reader in graph.consumers(node.name) if reader.kind != "size"]
    blocks = {_read_blocks(reader, node.outputs[0].shape, ranks) for reader in readers}
    return blocks.pop() if len(blocks) == 1 else 1


def _read_blocks(reader: Node, given: tuple[int, ...], ranks: int) -> int:
    shapes = [value.shape for value in reader.outputs]
    if reader.op in PIECES and {*shapes} == {(*given[:-1], given[-1] // len(shapes))}:
        return len(shapes) if shapes[0][-1] % ranks == 0 else 1
    if reader.op not in RESHAPES or shapes[0][: len(given) - 1] != given[:-1]:
        return 1
    blocks, *inner = shapes[0][len(given) - 1 :]
    return blocks if blocks % ranks and len(inner) > 1 and inner[0] % ranks == 0 else 1
