"""A running network's plan lowered again for other shares of samples and space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import ConvMeshError, UnsupportedError
from convmesh.graph import Captured
from convmesh.layout import Layout, Mesh
from convmesh.lowering.lower import lower
from convmesh.lowering.lowered import Lowered
from convmesh.plans.transfer_order import first_difference, transfer_order
from convmesh.private_torch import tree_map


def relowered(network: Captured, lowered: Lowered, opened: OpenMesh, mesh: Mesh) -> Lowered:
    """The plan on `mesh`, whose ranks have other shares; what one rank refuses, all refuse."""
    changed, problem = lowered, None
    try:
        plan = replace(lowered.plan, mesh=mesh)
        changed = lower(network, plan, opened.rank, device=opened.device.type)
        _check_calls(lowered, changed, mesh)
    except ConvMeshError as error:
        problem = str(error)
    opened.agree("`set_shares`", str(mesh), problem)
    opened.agree_on_lists("the program's transfers", transfer_order(changed.program), first_difference)
    return changed


def _check_calls(before: Lowered, after: Lowered, mesh: Mesh) -> None:
    """Shares move boxes, and nothing else: the calls that run stay as they were built."""
    for name in ("arranged", "shared", "cuts", "sum_axes", "eager"):
        if getattr(before, name) != getattr(after, name):
            raise UnsupportedError(f"{mesh}: these shares change what the network's layers do; make a plan for them.")


def end_layouts(network: Captured, lowered: Lowered, layout_of: Callable[[Layout], Layout]) -> tuple[list[Layout], Any]:
    """The layouts of the network's inputs, and those of its outputs in their structure."""
    (output,) = (n for n in network.module.graph.nodes if n.op == "output")
    names = torch.fx.map_arg(output.args[0], lambda n: n.name)
    outputs = tree_map(lambda n: layout_of(lowered.layouts[n][0]) if n in lowered.layouts else n, names)
    return [layout_of(lowered.layouts[node.name][0]) for node in network.graph.inputs], outputs
