"""Optimisers whose state is sharded over `data` (ZeRO stage 1).

Torch's own two do not fit. `ZeroRedundancyOptimizer` gives whole parameters to ranks, so one large dense layer puts
most of the state on one rank; it all-reduces whole gradients first, and its broadcast has no rule for cut weights
(DTensors). `fully_shard` (FSDP2) reduces all parameters of a module over one mesh, while here each gradient is partial
along its own axes (a norm's differ from its convolution's), and it refuses weights whose device mesh already names
`data` ("overlapping meshes"), as cut weights' meshes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from convmesh.errors import UnsupportedError
from convmesh.gradients.clip import clip_held_
from convmesh.gradients.owners import owner_of
from convmesh.gradients.scattered import ShardedReducer

ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
)
"""Torch's optimisers that update each value from its own history alone: they may see a parameter in pieces."""

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ShardedOptimizer(Optimizer):
    """`ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)`: each rank along `data` updates its part.

    `param_groups` hold this rank's runs of the parameters, with their gradients, so schedulers and `GradScaler` work on
    them as usual. `state_dict` is this rank's part: it loads on the same rank of the same mesh.
    """

    def __init__(self, params: Params, optimizer: type[Optimizer], **options: Any) -> None:
        _check_optimizer(optimizer)
        groups = _groups(list(params))
        self.reducer = _reducer_of([p for group in groups for p in group["params"]])
        self.inner = optimizer([self._group(group) for group in groups], **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._adopt()

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parts; parameters that are not scattered stay whole."""
        return {**group, "params": [held for p in group["params"] for held, _ in self.reducer.held(p)]}

    def _adopt(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's part and receive the others'."""
        loss = self.inner.step(closure)
        with torch.no_grad():
            for bucket in self.reducer.scattered:
                bucket.start_showing()
            for bucket in self.reducer.scattered:
                bucket.finish_showing()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: those of the parts, and those that `no_sync` left on the parameters."""
        self.inner.zero_grad(set_to_none)
        for parameter in self.reducer.scattered_parameters:
            parameter.grad = None

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the norm of all gradients, each value counted once, the same on every rank."""
        held = [pair for group in self.param_groups for p in group["params"] for pair in self.reducer.held(p)]
        return clip_held_([(self.reducer.mesh, held)], max_norm, norm_type, error_if_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._adopt()


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    if params and isinstance(params[0], dict):
        return [{**group, "params": list(group["params"])} for group in params]
    return [{"params": params}]


def _reducer_of(parameters: list[torch.Tensor]) -> ShardedReducer:
    owners = {id(owner): owner for p in parameters if (owner := owner_of(p)) is not None}
    reducers = [owner for owner in owners.values() if isinstance(owner, ShardedReducer)]
    if len(owners) != 1 or not reducers:
        raise UnsupportedError(
            f"`params` belong to {len(owners)} reducers, {len(reducers)} of them sharded; `ShardedOptimizer` takes the "
            'parameters of one network whose plan was made with reduction="sharded": '
            "`net.optimizer(torch.optim.AdamW, lr=1e-3)`."
        )
    return reducers[0]


def _check_optimizer(optimizer: type[Optimizer]) -> None:
    is_torchs = optimizer.__module__.startswith("torch.optim.")
    if not (is_torchs and optimizer.__name__ in ELEMENTWISE):
        raise UnsupportedError(
            f"`optimizer` (={optimizer.__name__}) may look at whole parameters, but each rank has runs of them; use "
            f'one of {", ".join(sorted(ELEMENTWISE))}, or reduction="bucketed" with any optimiser.'
        )
