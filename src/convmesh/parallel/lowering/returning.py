"""Sums that autograd itself makes: of the gradients that come back from several users of one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.parallel.lowering.dry import Dry
from convmesh.parallel.recorder import recorded
from convmesh.plan import NodeProgram, Step


def with_gradient_sums(
    nodes: Sequence[NodeProgram], values: Mapping[str, Any], mesh: OpenMesh
) -> tuple[NodeProgram, ...]:
    """The nodes; of a tensor's users, each but the last adds its gradient to those that came back before."""
    met: set[str] = set()
    known: dict[Dry, list[Step]] = {}
    found = [_with_sums(node, _again(node, values, met), mesh, known) for node in reversed(nodes)]
    return tuple(reversed(found))


def _again(node: NodeProgram, values: Mapping[str, Any], met: set[str]) -> list[Dry]:
    """Inputs of a node whose gradient another user has found already."""
    found = []
    made = values.get(node.node)
    for name in node.sources if not isinstance(made, Dry) or made.learns else ():
        value = values.get(name)
        if isinstance(value, Dry) and value.learns:
            found += [value] if name in met else []
            met.add(name)
    return found


def _with_sums(node: NodeProgram, again: list[Dry], mesh: OpenMesh, known: dict[Dry, list[Step]]) -> NodeProgram:
    if not again:
        return node
    steps = [step for value in again for step in _sum(value, mesh, known)]
    end = len(node.backward) - node.weight_steps
    return replace(node, backward=(*node.backward[:end], *steps, *node.backward[end:]))


def _sum(value: Dry, mesh: OpenMesh, known: dict[Dry, list[Step]]) -> list[Step]:
    if value not in known:
        local = value.on(mesh).local
        with torch.no_grad(), recorded(mesh) as steps:
            torch.add(local, local)
        known[value] = steps
    return known[value]
