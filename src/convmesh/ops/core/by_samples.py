"""Functions that treat samples one by one: where only samples are cut, torch's own version runs on the shard.

The split versions would give the same result after computing boxes and empty halos. A call that torch refuses is left
to them: they say what is wrong in terms of the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from convmesh.kernels.fusing import is_fused
from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT, fair_cut

Function = Callable[..., Any]
Keeps = Callable[..., bool]
"""Whether a call with these arguments, the first of them a shard, keeps samples apart."""

_keeps: dict[Function, Keeps] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LISTS = (list, tuple)


def by_samples(*functions: Function, when: Keeps | None = None) -> None:
    """Let torch's own functions run on shards of whole samples, if `when` allows it or is not given."""
    for function in functions:
        _keeps[function] = when or _always


def _always(x: Any, *args: Any, **kwargs: Any) -> bool:
    del x, args, kwargs
    return True


def not_along_samples(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    """For functions along one or several dims."""
    del args
    dim, ndim = kwargs.get("dim") if dim is None else dim, len(x.layout.cuts)
    if isinstance(dim, int):
        return _is_behind_samples(dim, ndim)
    return bool(dim) and all(isinstance(one, int) and _is_behind_samples(one, ndim) for one in dim)


def from_second_dim(x: Any, start_dim: int = 0, *args: Any, **kwargs: Any) -> bool:
    """For functions of a range of dims."""
    del args
    return _is_behind_samples(kwargs.get("start_dim", start_dim), len(x.layout.cuts))


def _is_behind_samples(dim: int, ndim: int) -> bool:
    """Whether the dim, counted from either end, exists and is not the first."""
    return 0 < dim < ndim or -ndim < dim < 0


def learns_partly(x: Any, *weights: Any) -> bool:
    """For layers: whether weights are plain tensors whose gradients, if ranks compute parts of them, a reducer sums."""
    for weight in weights:
        if weight is not None and weight.__class__ not in _PLAIN:
            return False
    mesh, axes = x.mesh, x.layout.axes
    if mesh.left_partial is None and not (axes and mesh.settings.sums_weights):
        return True
    return not mesh.weight_axes(axes)


def run_by_samples(function: Function, args: Any, kwargs: Any) -> Any:
    """The result, if only samples are cut and they stay apart; else None."""
    keeps = _keeps.get(function)
    if keeps is None or not args or is_fused() or (kwargs and kwargs.get("out") is not None):
        return None
    first = args[0]
    if first.__class__ in _LISTS:
        return _joined(function, keeps, first, args[1:], kwargs or {})
    if not hasattr(first, "mesh") or not first.layout.has_whole_samples:
        return None
    return _made(function, keeps, first, first.local, args[1:], kwargs or {})


def _joined(function: Function, keeps: Keeps, tensors: Sequence[Any], others: Any, options: Any) -> Any:
    """The result for a list of tensors whose samples are cut alike."""
    first = tensors[0] if tensors else None
    layout = getattr(first, "layout", None)
    if first is None or not isinstance(layout, Layout):
        return None
    cut, mesh, kind = layout.cuts[:1], first.mesh, first.__class__
    for x in tensors:
        if x.__class__ is not kind or x.mesh is not mesh or not x.layout.has_whole_samples or x.layout.cuts[:1] != cut:
            return None
    return _made(function, keeps, first, [x.local for x in tensors], others, options)


def _made(function: Function, keeps: Keeps, x: Any, local: Any, others: Any, options: Any) -> Any:
    """Run it, on plain tensors only: others, such as those of traces, must not see a call twice."""
    here = x.local
    try:
        if here.__class__ not in _PLAIN or not keeps(x, *others, **options):
            return None
        result = function(local, *others, **options)
    except Exception:
        return None
    if result.__class__ is not torch.Tensor:
        return None
    layout, given, made = x.layout, here.shape, result.shape
    if not given[0] or made[:1] != given[:1]:
        return None
    return x.__class__(result, layout if made == given else _layout_for(layout, made[1:]), x.mesh)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _layout_for(samples: Layout, shape: tuple[int, ...]) -> Layout:
    """Samples cut as they are, the dims after them whole."""
    return Layout(samples.mesh, (samples.cuts[0], *(fair_cut(samples.mesh, extent, ()) for extent in shape)))
