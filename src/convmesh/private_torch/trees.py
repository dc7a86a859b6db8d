"""Nested arguments and results of a model, walked as torch.fx and torch.export walk them; no public API exists."""

from functools import cache
from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_CONTAINERS = _pytree.SUPPORTED_NODES


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves, in torch's order. Plans ask for those of plain containers a hundred thousand times."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def _collect(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for part in tree:
            _collect(part, leaves)
    elif kind is dict:
        for part in tree.values():
            _collect(part, leaves)
    elif kind in _CONTAINERS or isinstance(tree, tuple):
        leaves += _pytree.tree_leaves(tree)
    else:
        leaves.append(tree)


def flat_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, str]:
    """The leaves of a call's arguments, torch's description of their nesting, and that as text."""
    if not kwargs and not any(isinstance(arg, (tuple, list, dict)) or type(arg) in _CONTAINERS for arg in args):
        return [*args], *_in_a_row(len(args))
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, spec, str(spec)


def nested_arguments(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments rebuilt from other leaves."""
    if spec is _in_a_row(len(leaves))[0]:
        return tuple(leaves), {}
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


@cache
def _in_a_row(count: int) -> tuple[Any, str]:
    spec = tree_flatten((tuple(range(count)), {}))[1]
    return spec, str(spec)
