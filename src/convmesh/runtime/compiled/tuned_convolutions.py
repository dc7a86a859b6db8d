"""Runs convolutions of a traced step with our own kernels, where a table of measurements says that they are faster."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.kernels.tuned import conv_ops
from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import Phase, shipped_table

_log = logging.getLogger(__name__)

aten = torch.ops.aten

Choose = Callable[[Phase, ConvShape, torch.Tensor], KernelConfig | None]
"""The kernel for a phase of a convolution of a tensor like the given one; None for torch's own."""


def choose(phase: Phase, shape: ConvShape, x: torch.Tensor) -> KernelConfig | None:
    """By the table for the GPU at hand; None without a table or without Triton."""
    if x.device.type != "cuda" or not has_triton():
        return None
    table = shipped_table(torch.cuda.get_device_name(x.device))
    return None if table is None else table.config_for(phase, shape, str(x.dtype).removeprefix("torch."))


@cache
def has_triton() -> bool:
    try:
        import triton
    except ImportError:
        _log.info("Triton is not installed: torch computes all convolutions")
        return False
    return triton is not None


def tune_convolutions(graph: fx.Graph, choice: Choose = choose) -> None:
    """Replace the phases of convolutions for which there is a better kernel."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        _tune_forward(node, choice)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        _tune_backward(node, choice)


def _tune_forward(node: fx.Node, choice: Choose) -> None:
    arguments: list[Any] = list(node.args)
    x, weight, bias, *rest = arguments
    shape = _shape(_value(x), _value(weight), rest)
    config = choice("forward", shape, _value(x)) if shape is not None else None
    if config is not None:
        args = (x, weight, bias, *rest[:3], conv_ops.numbers(config))
        _replace(node, _called(node, torch.ops.convmesh.conv.default, args))


def _tune_backward(node: fx.Node, choice: Choose) -> None:
    arguments: list[Any] = list(node.args)
    grad, x, weight, _, *rest, (wants_x, wants_w, wants_b) = arguments
    shape = _shape(_value(x), _value(weight), rest)
    if shape is None:
        return
    for_x = choice("input", shape, _value(x)) if wants_x else None
    for_w = choice("weight", shape, _value(x)) if wants_w else None
    if for_x is not None:
        args = (grad, x, weight, *rest[:3], conv_ops.numbers(for_x))
        _replace(_part(node, 0), _called(node, torch.ops.convmesh.conv_input_gradient.default, args))
    if for_w is not None:
        total = None if wants_b or for_w.swapped else _sum_for_bias(grad, node)
        args = (grad, x, weight, *rest[:3], wants_b or total is not None, conv_ops.numbers(for_w))
        both = _called(node, torch.ops.convmesh.conv_weight_gradient.default, args)
        for place in (1, 2) if wants_b else (1,):
            _replace(_part(node, place), _called(node, operator.getitem, (both, place - 1)))
        if total is not None:
            _replace(total, _called(node, operator.getitem, (both, 1)))
    left = [wants_x and for_x is None, wants_w and for_w is None, wants_b and for_w is None]
    if any(left):
        node.update_arg(len(node.args) - 1, left)
    else:
        graph = node.graph
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)


def _sum_for_bias(grad: fx.Node, before: fx.Node) -> fx.Node | None:
    """The sum of a gradient for the bias, if it is a separate call whose result nothing needs before the kernel."""
    value = _value(grad)
    for user in grad.users:
        if user.target is aten.sum.dim_IntList and len(user.args) == 2 and not user.kwargs:
            dims: Any = user.args[1]
            over = sorted(dim % value.dim() for dim in dims)
            if over == [0, *range(2, value.dim())] and all(before < later for later in user.users):
                return user
    return None


def _shape(x: torch.Tensor, weight: torch.Tensor, rest: list[Any]) -> ConvShape | None:
    """The convolution as kernels know it: volumes or images, channels-last, no groups, not transposed."""
    stride, padding, dilation, transposed, _, groups = rest
    last = CHANNELS_LAST.get(x.dim())
    if last is None or transposed or groups != 1 or not x.is_contiguous(memory_format=last):
        return None
    return ConvShape.of(x.shape, weight.shape, stride, padding, dilation)


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _part(node: fx.Node, place: int) -> fx.Node | None:
    """The node that takes one result of several, if any does."""
    return next((user for user in node.users if user.args[1] == place), None)


def _called(before: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call inserted before `before`, in the same layer, with its value noted."""
    with before.graph.inserting_before(before):
        call = before.graph.call_function(target, args)
    call.meta = {**before.meta}
    given = fx.map_arg(args, lambda n: n.meta["val"])
    call.meta["val"] = target(*given)
    return call


def _replace(old: fx.Node | None, new: fx.Node) -> None:
    if old is not None:
        old.replace_all_uses_with(new)
        if not old.users and old.target is not operator.getitem:
            old.graph.erase_node(old)
