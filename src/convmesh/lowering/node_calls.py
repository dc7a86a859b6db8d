"""The calls of a network's nodes: of modules and of functions, each after its input took the layout it asks for."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from convmesh.layout.channels import ChannelSplit
from convmesh.lowering.any_channels import conv_like, norm_like
from convmesh.lowering.any_extent import MOST_BYTES
from convmesh.lowering.arrange import Role, arrange, role_of
from convmesh.lowering.axis_names import Axes, AxisNames
from convmesh.lowering.channel_rules import LAYERS
from convmesh.lowering.dry_call import DryCall, Ready
from convmesh.lowering.dry_values import Dry
from convmesh.lowering.recent_results import RecentResults
from convmesh.lowering.weight_cuts import dry_weights
from convmesh.plans import Split
from convmesh.private_torch.module_tables import call_with, named_tensors

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ALIKE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Identity, *BATCH_NORMS,
)  # fmt: skip
ALIKE_FUNCTIONS: frozenset[Any] = frozenset(
    (operator.add, operator.iadd, operator.mul, torch.add, torch.mul, torch.relu, F.relu, F.leaky_relu, F.gelu, F.silu)
)
"""Calls that read single elements, or sums over all ranks: the place of a rank does not matter to them."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""They read single elements, too, if their kernel has only one."""

BY_SAMPLE = frozenset(
    (
        *ALIKE_MODULES, *LAYERS, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.Upsample, nn.LayerNorm, nn.GroupNorm,
    )
).difference(BATCH_NORMS)  # fmt: skip
"""Layers that treat samples one by one."""

DIMS_NAMED = {"flatten": 1, "unflatten": 1, "unbind": 1, "transpose": 2}
"""Methods that leave all dims before those they name unchanged, and how many leading arguments name dims."""

NORMS = (nn.LayerNorm, nn.GroupNorm)

BY_CHANNEL = frozenset(
    (
        *ALIKE_MODULES, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    )
).difference(BATCH_NORMS)  # fmt: skip
"""Layers without weights that treat channels one by one."""

_like: RecentResults[Any, tuple[nn.Module, Any]] = RecentResults(1 << 10)
"""Copies of layers with other numbers of channels, by the original's module key and that number."""


@dataclass(frozen=True)
class FunctionCall(DryCall):
    """A function or a tensor's method; `tensors` are the constants and weights among its arguments."""

    op: str
    target: Any
    split: Split | None
    moves: bool
    """Whether its input changes its layout first."""
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def key(self) -> Any:
        return self.op, self.target, self.split

    @property
    def axes(self) -> Axes:
        return () if self.split is None else self.split.axes

    @property
    def is_alike_everywhere(self) -> bool:
        return self.op == "call_function" and self.target in ALIKE_FUNCTIONS and not (self.moves or self.tensors)

    def on_own_samples(self, axes: Axes, args: Any) -> FunctionCall | None:
        if self.tensors or not _keeps_samples(self.split, axes):
            return None
        if self.op == "call_method":
            return replace(self, split=_without_samples(self.split)) if _keeps_first(self.target, *args) else None
        if self.op != "call_function":
            return None
        joins_later = self.target is torch.cat and _joined_dim(*args) > 0
        if self.target not in ALIKE_FUNCTIONS and not joins_later and not _picks(self.target, *args):
            return None
        return replace(self, split=_without_samples(self.split))

    @property
    def counts_samples(self) -> bool:
        return True  # those functions that treat samples one by one do

    def with_channels(self, channels: int) -> FunctionCall | None:
        del channels
        is_counted = self.target in ALIKE_FUNCTIONS or self.joins_channels
        if self.op != "call_function" or not is_counted or self.tensors or (self.split and self.split.channel):
            return None
        return self

    @property
    def joins_channels(self) -> bool:
        return self.target is torch.cat

    def renamed(self, names: AxisNames) -> FunctionCall:
        return replace(self, split=names.split(self.split))

    def ready(self) -> Ready:
        return partial(_after_arranging, function_of(self.op, self.target), self.split, role_of(None)), [*self.tensors]


@dataclass(frozen=True, eq=False)
class ModuleCall(DryCall):
    """A layer of the network."""

    layer: str
    module: nn.Module
    module_key: Any
    split: Split | None
    moves: bool
    cuts_norm: bool
    """Whether its input's channels are cut, so that a norm has only theirs."""
    decided: ChannelSplit | None
    """The cut of its weight, where an earlier call of the layer has decided on it."""
    blocks: int = 1
    """Blocks in which its features are read."""
    role: Role = "follows"
    """What it does with channels."""

    @property
    def key(self) -> Any:
        return None if self.module_key is None else (self.module_key, self.split, self.decided, self.blocks, self.role)

    @property
    def axes(self) -> Axes:
        return () if self.split is None else self.split.axes

    @property
    def uses_sub_batches(self) -> bool:
        return isinstance(self.module, nn.Linear)

    @property
    def is_alike_everywhere(self) -> bool:
        if self.moves or (self.split is not None and self.split.channel):
            return False
        return type(self.module) in ALIKE_MODULES or _is_pointwise(self.module)

    def on_own_samples(self, axes: Axes, args: Any) -> ModuleCall | None:
        del args
        decided = () if self.decided is None else self.decided.axes
        if type(self.module) not in BY_SAMPLE or not _keeps_samples(self.split, axes) or {*decided} & {*axes}:
            return None
        return replace(self, split=_without_samples(self.split))

    @property
    def counts_samples(self) -> bool:
        """How channels are cut depends only on what is sent per sample, so the number of samples does not matter."""
        weight = getattr(self.module, "weight", None)
        return type(self.module) not in NORMS and (weight is None or int(weight.nbytes) <= MOST_BYTES)

    def with_channels(self, channels: int) -> ModuleCall | None:
        kind, cuts_weights = type(self.module), self.decided is not None or (self.split and self.split.channel)
        if kind in BY_CHANNEL and not cuts_weights:
            return self
        is_counted = not self.moves if kind in BATCH_NORMS else _sums_channels(self.module) and not cuts_weights
        if self.module_key is None or not is_counted:
            return None
        many = _like.get((self.module_key, channels))
        if many is None:
            module = (norm_like if kind in BATCH_NORMS else conv_like)(self.module, channels)
            many = _like[self.module_key, channels] = module, module_key(module)
        return replace(self, module=many[0], module_key=many[1])

    @property
    def finds_statistics(self) -> bool:
        return type(self.module) in BATCH_NORMS

    @property
    def filters(self) -> int:
        return int(self.module.out_channels) if type(self.module) in CONVOLUTIONS else 0  # type: ignore[arg-type]

    def with_choice(self, decided: ChannelSplit | None) -> ModuleCall:
        if self.split is None or decided is None or self.split.algorithm == decided.algorithm:
            return self
        return replace(self, split=replace(self.split, algorithm=decided.algorithm))

    def renamed(self, names: AxisNames) -> ModuleCall:
        if not names.pairs:
            return self
        return replace(self, split=names.split(self.split), decided=names.weight_split(self.decided))

    def ready(self) -> Ready:
        weights = dry_weights(self.layer, self.module, self.split, self.cuts_norm, self.decided, self.blocks)
        call = partial(_with_weights, self.module, weights)
        return partial(_after_arranging, call, self.split, self.role), list(weights.values())


def _is_pointwise(module: nn.Module) -> bool:
    if type(module) not in CONVOLUTIONS:
        return False
    layer: Any = module
    return {*layer.kernel_size} == {*layer.stride} == {1} and {*layer.padding} == {0}


def _sums_channels(module: nn.Module) -> bool:
    """Whether a layer is a convolution that sums over all its input channels, with a contiguous weight."""
    layer: Any = module
    return type(module) in CONVOLUTIONS and layer.groups == 1 and bool(layer.weight.is_contiguous())


def _keeps_samples(split: Split | None, axes: Axes) -> bool:
    return split is None or split.sample == axes


def _without_samples(split: Split | None) -> Split | None:
    return None if split is None else _cut_apart(split)


@cache
def _cut_apart(split: Split) -> Split:
    return replace(split, sample=())


def _keeps_first(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor's method only concerns dims after the first."""
    x, *given = args
    if kwargs or not isinstance(x, Dry):
        return False
    if method == "permute":
        order = given[0] if len(given) == 1 else given
        return bool(order) and order[0] == 0
    dims = given[: DIMS_NAMED.get(method, 0)]
    return bool(dims) and all(type(dim) is int and dim % len(x.layout.cuts) > 0 for dim in dims)


def _picks(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes one of several results of another."""
    return function is operator.getitem and not kwargs and isinstance(args[0], (list, tuple)) and type(args[1]) is int


def _joined_dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return dim if isinstance(dim, int) else 0


def module_key(module: nn.Module) -> int | None:
    """Distinguishes calls of modules; None for a module whose forward may depend on anything."""
    if not type(module).__module__.startswith("torch.nn."):
        return None
    shapes = tuple((name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in named_tensors(module))
    return _numbered((type(module), module.extra_repr(), module.training, shapes))


_numbers = itertools.count()


@lru_cache(maxsize=1 << 14)
def _numbered(described: tuple[Any, ...]) -> int:
    """A number for each description: calls are looked up by it a hundred thousand times."""
    del described
    return next(_numbers)


def function_of(op: str, target: Any) -> Callable[..., Any]:
    """The function or method that a node calls."""
    if op == "call_method":
        return partial(_call_method, str(target))
    function: Callable[..., Any] = target
    return function


def call_of(root: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    """What a node calls."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    return function_of(node.op, node.target)


def _call_method(name: str, receiver: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(receiver, name)(*args, **kwargs)


def _after_arranging(call: Callable[..., Any], split: Split | None, role: Role, *args: Any, **kwargs: Any) -> Any:
    if split is not None:
        args = (arrange(args[0], split, role), *args[1:])
    return call(*args, **kwargs)


def _with_weights(module: nn.Module, weights: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return call_with(module, weights, args, kwargs)
