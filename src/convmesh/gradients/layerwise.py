"""Optimisers that scale each layer's update by the norm of its weights: LARS and LAMB, for large batches.

The norms are those of whole weights: for a cut weight, every rank contributes the squares of its shard.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.optim import Optimizer

from convmesh.dist import OpenMesh, all_reduce
from convmesh.gradients.local_gradients import local_gradient, local_of
from convmesh.gradients.owners import Axes, distinct_axes, mesh_of
from convmesh.private_torch.tensor_internals import norms_of

Part = tuple[torch.Tensor, torch.Tensor]
"""A parameter, and a tensor shaped like this rank's shard of it."""


class LayerwiseOptimizer(Optimizer):
    """Groups have `lr`, `weight_decay`, and `adapt`: whether their layers are scaled at all."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. Call it on every rank that holds a part of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        directions = [(p, self._direction(p, group)) for p, group in pairs]
        weights = whole_norms([(p, local_of(p)) for p, _ in pairs])
        updates = whole_norms(directions)
        for (p, group), (_, update), weight, norm in zip(pairs, directions, weights, updates, strict=True):
            ratio = self._ratio(weight, norm, group) if group["adapt"] else torch.ones_like(weight)
            self._apply(p, update * ratio.to(update.dtype), group)
        return loss

    @abstractmethod
    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The update of this rank's shard before it is scaled."""

    @abstractmethod
    def _ratio(self, weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The layer's factor, from the norms of its weights and of their update."""

    @abstractmethod
    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        """Change this rank's shard by the scaled update."""

    def _state(self, parameter: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """This rank's shards of a parameter's state tensors, zero at first."""
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [local_of(state[name]) for name in names]


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017): momentum, each layer at its own rate.

    The rate of a layer is `trust · |w| / |g + weight_decay · w|`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        adapt: bool = True,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt}
        )

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return local_gradient(parameter).add(local_of(parameter), alpha=group["weight_decay"])

    def _ratio(self, weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return _where_both(weight, update, group["trust"])

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        (buffer,) = self._state(parameter, "momentum_buffer")
        buffer.mul_(group["momentum"]).add_(update)
        local_of(parameter).sub_(buffer, alpha=group["lr"])


class LAMB(LayerwiseOptimizer):
    """Adam, each layer's update scaled to the norm of its weights (You et al., "Large batch optimization", 2020)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        grad, state = local_gradient(parameter), self.state[parameter]
        mean, square = self._state(parameter, "exp_avg", "exp_avg_sq")
        state["step"] = state.get("step", torch.zeros(())) + 1
        count, (first, second) = int(state["step"]), group["betas"]
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        divisor = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        direction: torch.Tensor = (mean / (1 - first**count)).div_(divisor)
        return direction.add_(local_of(parameter), alpha=group["weight_decay"])

    def _ratio(self, weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        del group
        return _where_both(weight, update, 1.0)

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        local_of(parameter).sub_(update, alpha=group["lr"])


def _where_both(weight: torch.Tensor, update: torch.Tensor, factor: float) -> torch.Tensor:
    """`factor · weight / update`, or 1 where either is 0: without a branch, so that nothing waits for a GPU."""
    ratio: torch.Tensor = torch.where((weight > 0) & (update > 0), factor * weight / update, 1.0)
    return ratio


def whole_norms(parts: Sequence[Part]) -> list[torch.Tensor]:
    """The norm of each whole tensor, from this rank's shards: in float64, one sum over ranks for each kind of cut."""
    shards = [local if local.numel() else local.new_zeros(1) for _, local in parts]
    norms = [norm.double() for norm in norms_of(shards, 2.0)] if parts else []
    cut: dict[tuple[int, Axes], tuple[OpenMesh, list[int]]] = {}
    for index, (parameter, _) in enumerate(parts):
        axes, mesh = distinct_axes(parameter), mesh_of(parameter)
        if axes and mesh is not None:
            cut.setdefault((id(mesh), axes), (mesh, []))[1].append(index)
    for (_, axes), (mesh, indices) in cut.items():
        squares = all_reduce(torch.stack([norms[i] for i in indices]).square(), mesh, axes)
        for index, square in zip(indices, squares, strict=True):
            norms[index] = square.sqrt()
    return norms
