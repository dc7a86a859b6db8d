"""Batches in the types that a step reads: what autocast would cast first is cast when it is handed over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from convmesh.private_torch.tracing import is_cast


def read_as_cast(batch: Sequence[fx.Node]) -> None:
    """Replace each input that a step reads only through one narrower cast by that cast."""
    for given in batch:
        casts = list(given.users)
        if casts and all(map(_narrows, casts)) and len({cast.meta["val"].dtype for cast in casts}) == 1:
            given.meta["val"] = casts[0].meta["val"]
            for cast in casts:
                cast.replace_all_uses_with(given)
                cast.graph.erase_node(cast)


def _narrows(node: fx.Node) -> bool:
    if not is_cast(node.target) or set(node.kwargs) - {"dtype"}:
        return False
    given = node.all_input_nodes[0].meta["val"]
    return bool(node.meta["val"].element_size() < given.element_size())
