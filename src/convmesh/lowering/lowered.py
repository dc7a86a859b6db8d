"""A plan lowered for a network: the program of one rank, and what the runtime builds itself from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.kernels.memory_format import Order
from convmesh.layout import Layout
from convmesh.lowering.arrange import Arranged
from convmesh.lowering.weight_cuts import Axes, Cuts
from convmesh.plans import Plan, Program


@dataclass(frozen=True)
class Lowered:
    """What the runtime needs of a plan for a network, and the program of one rank."""

    plan: Plan
    program: Program
    device: str
    """The kind of device, cpu or cuda, whose kernels the program names."""
    layouts: dict[str, tuple[Layout, ...]]
    """By node: the layouts of its outputs."""
    arranged: dict[str, Arranged]
    """Nodes whose input changes its layout first, and what asks for it."""
    shared: dict[str, str]
    """Nodes that take an input that another node rearranged, and that node."""
    cuts: dict[str, Cuts]
    """By weight: the axes that cut its dims."""
    blocks: dict[str, int]
    """By weight whose first dim is cut block by block: their number."""
    sum_axes: dict[str, Axes]
    """By weight, in the order of their first use: the axes over which its gradient is summed after backward."""
    eager: frozenset[str]
    """Nodes that sum their weights' gradients at once, because the weights also serve nodes with other axes."""
    numbers: dict[str, Any]
    """By node: sizes, shapes and what is computed from them."""
    dtypes: dict[str, torch.dtype]
    """By node that returns one tensor."""
    orders: dict[str, Order]
    """By node that returns one tensor: its dims in memory order."""
