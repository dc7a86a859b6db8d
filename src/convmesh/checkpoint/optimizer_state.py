"""Optimiser states by parameter name: tensors like the parameter as boxes, numbers and options as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.checkpoint.spreading import HeldTensor
from convmesh.checkpoint.tensor_file import TYPES, type_name
from convmesh.errors import CheckpointError, UnsupportedError
from convmesh.gradients import ShardedOptimizer
from convmesh.gradients.local_gradients import as_gradient_of, local_of
from convmesh.runtime import ParallelNet
from convmesh.runtime.weight_places import WeightPlace, update_places

LOCAL_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that say how an optimiser runs on this machine, not what it computes: they are not loaded."""

PREFIX = "optimizer"


def tensor_name(key: str, parameter: str) -> str:
    """What a checkpoint calls the state `key` of a parameter."""
    return f"{PREFIX}/{key}/{parameter}"


def kind_of(optimizer: Optimizer) -> str:
    """The class that makes the updates."""
    return type(optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer).__name__


def described(optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's kind, and the options of its groups."""
    return {"kind": kind_of(optimizer), "groups": [_options(group) for group in optimizer.param_groups]}


class OptimizerState:
    """This rank's part of an optimiser's state, in terms of the network's parameters."""

    def __init__(self, net: ParallelNet, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        known = {id(held): (held, place) for held, place in update_places(net)}
        self.updated = [self._known(known, p) for group in optimizer.param_groups for p in group["params"]]
        """In the order of the optimiser's own `state_dict`."""

    def _known(self, known: dict[int, tuple[torch.Tensor, WeightPlace]], p: torch.Tensor) -> Any:
        if id(p) not in known:
            raise UnsupportedError(
                f"`optimizer` updates a tensor of shape {tuple(p.shape)} that is no parameter of `net`; give it "
                "`net.parameters()`, best with `net.optimizer(...)`."
            )
        return known[id(p)]

    def held(self) -> Iterator[HeldTensor]:
        """State tensors that are cut like their parameters."""
        for parameter, place in self.updated:
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if not _is_number(key, value, place):
                    yield HeldTensor(_place_of(key, value, place), local_of(value))

    def numbers(self) -> dict[str, dict[str, Any]]:
        """State that is not a tensor like its parameter, such as the step count, by parameter."""
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, place in self.updated:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if _is_number(key, value, place):
                    numbers.setdefault(place.name, {})[key] = _plain(value)
        return numbers


def empty_like(parameter: torch.Tensor, dtype: str) -> torch.Tensor:
    """Memory for a state tensor of a parameter, cut as it is."""
    return as_gradient_of(parameter, torch.empty_like(local_of(parameter), dtype=TYPES[dtype]))


def number(plain: Any) -> Any:
    """A number as the optimiser kept it: a tensor, or a Python number."""
    return torch.tensor(plain["value"], dtype=TYPES[plain["dtype"]]) if isinstance(plain, dict) else plain


def merged_options(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of an optimiser with the options of a checkpoint."""
    if len(saved) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimiser has {len(saved)} groups of parameters, `optimizer` has {len(groups)}; make it "
            "with the same groups."
        )
    return [
        {**group, **{k: _like(v, group.get(k)) for k, v in options.items()}}
        for options, group in zip(saved, groups, strict=True)
    ]


def _place_of(key: str, value: Any, place: WeightPlace) -> WeightPlace:
    if not isinstance(value, torch.Tensor) or tuple(local_of(value).shape) != place.held_shape:
        what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedError(
            f"the optimiser's state {key!r} of {place.name!r} ({what}) is neither a number nor like its parameter; "
            "it cannot be cut another way. Save with `optimizer=None`, or use an elementwise optimiser."
        )
    return replace(place, name=tensor_name(key, place.name))


def _is_number(key: str, value: Any, place: WeightPlace) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and (key == "step" or place.shape != ())
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    return {"value": value.item(), "dtype": type_name(value.dtype)} if isinstance(value, torch.Tensor) else value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    plain = {key: v.item() if _is_scalar(v) else v for key, v in group.items() if key not in LOCAL_OPTIONS}
    return {key: value for key, value in plain.items() if _is_json(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _like(value: Any, present: Any) -> Any:
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(present, tuple) else value
