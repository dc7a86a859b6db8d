"""`F.linear` on weights of the model: to a plan it is a dense layer like any other, only called without its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

NAMES = ("weight", "bias")


def weights_of_call(node: fx.Node) -> dict[str, str]:
    """The model's names of the weight and bias that a call of `F.linear` reads as they are; empty for other calls."""
    if node.op != "call_function" or node.target is not F.linear or len(node.args) < 2:
        return {}
    given = dict(zip(NAMES, (*node.args[1:], *node.kwargs.values()), strict=False))
    read = {name: value for name, value in given.items() if value is not None}
    paths = {name: str(v.target) for name, v in read.items() if isinstance(v, fx.Node) and v.op == "get_attr"}
    return paths if len(paths) == len(read) else {}


def stand_in(tensors: Mapping[str, Any]) -> nn.Linear | None:
    """A layer without data for a call on such tensors; None if no layer could have them."""
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not isinstance(bias, nn.Parameter | None):
        return None
    filters, channels = weight.shape
    layer = nn.Linear(channels, filters, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
    return layer


def tensor_at(root: nn.Module, path: str) -> Any:
    """A module's tensor by its name."""
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)
