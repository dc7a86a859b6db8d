"""The options of a call apart from its shapes: windows by name, other settings as written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

_MODULE_WINDOW = {
    "kernel": "kernel_size", "stride": "stride", "padding": "padding", "dilation": "dilation", "groups": "groups",
    "output_padding": "output_padding", "output_size": "output_size",
}  # fmt: skip
_CONV = ("stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = ("stride", "padding", "output_padding", "groups", "dilation")
_POOL = ("kernel", "stride", "padding", "dilation")
_CONV_DEFAULTS: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def module_options(module: nn.Module, dims: int) -> dict[str, object]:
    """Settings of a module; windows have one number for each of `dims` dims."""
    options: dict[str, object] = {
        name: _per_dim(getattr(module, attribute), dims, name)
        for name, attribute in _MODULE_WINDOW.items()
        if hasattr(module, attribute)
    }
    if not getattr(module, "transposed", False):  # convolutions have one too, always 0
        options.pop("output_padding", None)
    if parametrize.is_parametrized(module) or _is_written_before_forward(module):
        options["parametrized"] = True
    if not options and (text := module.extra_repr()):
        options["settings"] = text
    return options


def _is_written_before_forward(module: nn.Module) -> bool:
    """Whether a hook makes its weight, as torch.nn.utils.weight_norm does: an attribute, and no parameter."""
    return isinstance(module.__dict__.get("weight"), torch.Tensor)


def function_options(node: fx.Node, kind: str, weights: tuple[tuple[int, ...], ...], dims: int) -> dict[str, object]:
    """Settings of a function call; `weights` are the shapes of its tensor arguments after the first."""
    args, kwargs = _literals(node)
    if kind in ("conv", "conv_transpose") and weights:
        names = _CONV if kind == "conv" else _CONV_TRANSPOSE
        given = {**dict(zip(names, args[3:], strict=False)), **kwargs}
        window = {"kernel": weights[0][2:], **_CONV_DEFAULTS, **given}
    elif kind == "pool" and "adaptive" not in str(node.target):
        named = {"kernel" if name == "kernel_size" else name: value for name, value in kwargs.items()}
        window = {**dict(zip(_POOL, args[1:], strict=False)), **named}
        window.setdefault("stride", None)
        window["stride"] = window.get("kernel") if window["stride"] is None else window["stride"]
    else:
        rest = {"arguments": tuple(args[1:])} if len(args) > 1 else {}
        return {**rest, **kwargs}
    return {name: _per_dim(value, dims, name) for name, value in window.items() if value is not None}


def _literals(node: fx.Node) -> tuple[list[object], dict[str, object]]:
    """Arguments as written, other nodes by name."""
    shown = fx.node.map_arg((list(node.args), dict(node.kwargs)), lambda argument: argument.name)
    return [_plain(arg) for arg in shown[0]], {name: _plain(arg) for name, arg in shown[1].items()}


def _plain(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return ":".join("" if part is None else str(part) for part in (value.start, value.stop, value.step))
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _per_dim(value: Any, dims: int, name: str) -> object:
    if name == "groups" or isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, int):
        return (value,) * dims
    if isinstance(value, (tuple, list, torch.Size)) and len(value) == 1:
        return tuple(value) * dims
    return tuple(value) if isinstance(value, (tuple, list)) else value
