"""A user's module while its network is split: calls of the network run on shards, and logged values are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from convmesh.errors import PlanError, ShapeError
from convmesh.lightning.first_batch import positional
from convmesh.ops import Sharded, shard
from convmesh.private_torch import tree_map
from convmesh.runtime import ParallelNet
from convmesh.runtime.full_state import gather_cut_weights

Outputs = Literal["cut", "whole"]


def network_of(module: nn.Module, name: str | None) -> tuple[nn.Module, str]:
    """The network inside a user's module and its name, which is empty for the module itself."""
    if name is not None:
        try:
            return module.get_submodule(name), name
        except AttributeError:
            raise PlanError(f"`network` (={name!r}) is no part of {type(module).__name__}{_parts(module)}.") from None
    holding = [each for each, part in module.named_children() if any(True for _ in part.parameters())]
    if len(holding) == 1:
        return module.get_submodule(holding[0]), holding[0]
    if "forward" in type(module).__dict__:
        return module, ""
    raise PlanError(
        f"`network` must name the part of {type(module).__name__} to split: it has no `forward` of its own, and "
        f"{len(holding)} parts with weights{_parts(module)}."
    )


def _parts(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()]
    return f"; its parts are {', '.join(map(repr, names))}" if names else ""


class SplitModule:
    """Puts a split network in place of the one in `module`; `end` takes it out again."""

    def __init__(self, module: nn.Module, network: nn.Module, net: ParallelNet, outputs: Outputs) -> None:
        self._net: ParallelNet | None = net
        self.mesh, self.plan = net.mesh, net.plan
        self._network, self._outputs = network, outputs
        log: Any = module.log
        self._forward, self._log = network.forward, log
        self._before: list[tuple[Any, str, Any]] = []
        self._put(network, "forward", self._run)
        self._put(module, "log", self._logged)
        metrics: list[Any] = [part for part in module.modules() if is_metric(part)]
        for metric in metrics:
            self._put(metric, "update", _with_whole_tensors(metric.update))
            self._put(metric, "distributed_available_fn", _is_complete)

    @property
    def net(self) -> ParallelNet:
        assert self._net is not None, "the trainer is done with this network"
        return self._net

    def end(self, makes_whole: bool) -> None:
        """Leave the module as it was, with whole weights unless some ranks are missing to gather them."""
        for owner, name, before in reversed(self._before):
            owner.__dict__.pop(name)
            owner.__dict__.update({} if before is None else {name: before[0]})
        self._before.clear()
        if makes_whole:
            gather_cut_weights(self._network, self.mesh)
        self._net = None  # it keeps summing gradients as long as it lives

    def _put(self, owner: Any, name: str, value: Any) -> None:
        own = owner.__dict__
        self._before.append((owner, name, (own[name],) if name in own else None))
        own[name] = value

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        net = self.net
        net.training = self._network.training
        inputs = positional(self._forward, args, kwargs)
        output, _ = net.output_and_target(*(self._placed(x, i) for i, x in enumerate(inputs)))
        return whole_tensors(output) if self._outputs == "whole" else output

    def _placed(self, x: Any, index: int) -> Any:
        """This rank's shard of an input that every rank has whole."""
        layouts = self.net.input_layouts(x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else None)
        if isinstance(x, Sharded) or not isinstance(x, torch.Tensor) or index >= len(layouts):
            return x
        layout = layouts[index]
        if tuple(x.shape) != layout.shape:
            raise ShapeError(
                f"the network's input {index} has shape {tuple(x.shape)}, but the plan was made for samples of "
                f"{layout.shape[1:]}; give all loaders samples of one shape, or a trainer of their own."
            )
        return shard(x, self.net.mesh, layout)

    def _logged(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._log(name, plain_numbers(value), *args, **kwargs)


def is_metric(part: nn.Module) -> bool:
    """Whether a module is a torchmetrics metric; torchmetrics comes with Lightning."""
    return any(kind.__name__ == "Metric" and kind.__module__.startswith("torchmetrics") for kind in type(part).__mro__)


def plain_numbers(value: Any) -> Any:
    """A nested value with plain tensors in place of sharded ones that every rank holds whole."""
    return tree_map(lambda x: x.local if isinstance(x, Sharded) and not x.layout.axes else x, value)


def whole_tensors(value: Any) -> Any:
    """A nested value with whole plain tensors in place of sharded ones."""
    return tree_map(lambda x: x.gather() if isinstance(x, Sharded) else x, value)


def _is_complete() -> bool:
    """Whether a metric must ask other ranks: every rank has seen the whole batch."""
    return False


def _with_whole_tensors(update: Callable[..., Any]) -> Callable[..., Any]:
    def updated(*args: Any, **kwargs: Any) -> Any:
        return update(*whole_tensors(args), **whole_tensors(kwargs))

    return updated
