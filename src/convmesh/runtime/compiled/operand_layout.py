"""Operands of convolutions, laid out as kernels want them while a compiler can still merge the copy with other work.

A kernel given part of a tensor, such as the gradient of one input of `cat`, copies it first, and slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from convmesh.kernels.memory_format import CHANNELS_LAST, is_channels_last

_OPERANDS = {torch.ops.aten.convolution.default: 2, torch.ops.aten.convolution_backward.default: 3}
"""The number of tensors that each convolution reads."""


def lay_out_operands(graph: fx.Graph) -> None:
    """Give each convolution dense operands: all channels-last if any of them is, otherwise all plain."""
    inputs: dict[tuple[Any, Any], fx.Node] = {}
    """Copies of inputs, by source and weight: backward reads the copy that forward made."""
    for target, count in _OPERANDS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            operands: list[Any] = list(node.args[:count])
            values = [operand.meta["val"] for operand in operands]
            last = any(map(is_channels_last, values))
            wanted = CHANNELS_LAST[values[0].dim()] if last else torch.contiguous_format
            for place, value in enumerate(values[:-1]):  # weights are copied in their own format already
                if value.is_contiguous(memory_format=wanted):
                    continue
                pair = operands[place], operands[-1]
                known = inputs.get(pair) if place == count - 2 else None
                copy = _copied(node, operands[place], wanted) if known is None else known
                node.update_arg(place, copy)
                inputs[pair] = copy


def _copied(before: fx.Node, operand: fx.Node, wanted: torch.memory_format) -> fx.Node:
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(torch.ops.aten.clone.default, (operand,), {"memory_format": wanted})
    copy.meta |= before.meta  # of the same layer
    copy.meta["val"] = operand.meta["val"].clone(memory_format=wanted)
    return copy
