"""Putting a rank's program together: what each node does, what each weight is, what the gradients' sums cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.graph import Captured, Node
from convmesh.layout import Layout
from convmesh.lowering.arrange import Arranged
from convmesh.lowering.dry_values import Dry, DryResult, dries_in
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.operator_calls import dtype_name
from convmesh.lowering.weight_cuts import Axes, DecidedCuts, shared_sums, weight_programs
from convmesh.plans import NodeProgram, Plan, Program
from convmesh.private_torch import tree_leaves


class Assembly:
    """Collects the nodes of one rank's program in the order of their calls."""

    def __init__(self, captured: Captured, plan: Plan, mesh: OpenMesh, weights: DecidedCuts) -> None:
        self._graph, self._plan, self._mesh, self._weights = captured.graph, plan, mesh, weights
        self.nodes: list[NodeProgram] = []
        self.uses: dict[str, list[tuple[str, Axes]]] = defaultdict(list)
        """By weight: the nodes that it serves, and the axes that cut their work."""
        self.computed: set[str] = set()
        """Weights that others are computed from: gradients that reach them that way are already summed."""
        self.eager: set[str] = set()
        """Nodes that sum the gradients of their weights themselves."""

    def note(self, spec: Node, given: tuple[Layout, ...], result: DryResult, env: Mapping[str, Any]) -> None:
        """Add a node that was run dry; `env` holds the values of the nodes before it."""
        made = dries_in(result.value)
        self.nodes.append(
            NodeProgram(
                node=spec.name,
                layer=spec.layer,
                inputs=given,
                outputs=tuple(x.layout for x in made),
                dtypes=tuple(dtype_name(x.dtype) for x in made),
                forward=result.forward,
                backward=result.backward,
                saved=result.saved,
                sources=tuple(name for name in spec.inputs if isinstance(env.get(name), Dry)),
                held=result.held,
                block=self._plan.recomputed(spec.layer) or "",
                weights=tuple(weight.name for weight in spec.weights if weight.learns),
                weight_steps=result.weight_steps,
                kind=node_kind(spec.op),
                flow=result.flow,
            )
        )
        used = {name for axes in result.sum_axes for name in axes}
        in_mesh_order = tuple(name for name in self._plan.mesh.axes if name in used)
        for weight in spec.weights:
            if weight.learns:
                self.uses[weight.name].append((spec.name, in_mesh_order))

    @property
    def mixed(self) -> frozenset[str]:
        """Nodes whose weights also serve others such that one sum after backward would not be right for both."""
        return self._sums()[1]

    def _sums(self) -> tuple[dict[str, Axes], frozenset[str]]:
        uses = {name: [*by, *([("", ())] if name in self.computed else [])] for name, by in self.uses.items()}
        sum_axes, eager = shared_sums(uses)
        return sum_axes, eager - {""}

    def lowered(
        self,
        nodes: tuple[NodeProgram, ...],
        env: Mapping[str, Any],
        arranged: dict[str, Arranged],
        shared: dict[str, str],
    ) -> Lowered:
        """The result; `nodes` are those that were noted, with backward as gradients reach them."""
        sum_axes, eager = self._sums()
        tensors = {name: value for name, value in env.items() if isinstance(value, Dry)}
        return Lowered(
            plan=self._weights.decided_plan(self._plan),
            program=self._program(nodes, sum_axes),
            device=self._mesh.stands_for,
            layouts={node.node: node.outputs for node in nodes},
            arranged=arranged,
            shared=shared,
            cuts=self._weights.cuts,
            blocks=self._weights.blocks,
            sum_axes=sum_axes,
            eager=eager | self.eager,
            numbers={name: value for name, value in env.items() if not _has_tensors(value)},
            dtypes={name: value.dtype for name, value in tensors.items()},
            orders={name: value.order for name, value in tensors.items()},
        )

    def _program(self, nodes: tuple[NodeProgram, ...], sum_axes: dict[str, Axes]) -> Program:
        weights = weight_programs(self._graph.weights, self._mesh, self._weights.cuts, sum_axes)
        program = Program(self._plan.mesh, self._mesh.rank, nodes, weights, precision=self._plan.precision)
        program = replace(program, compile=self._plan.compile)
        bytes_inputs, bytes_targets = self._batch_sizes()
        program = replace(program, bytes_inputs=bytes_inputs, bytes_targets=bytes_targets)
        if self._plan.pipeline is not None:  # each stage sums its own
            return program
        return with_sums(program, sum_axes, self._mesh, self._plan.summing)

    def _batch_sizes(self) -> tuple[int, int]:
        """Bytes of this rank's inputs, and of targets that hold one class per sample or voxel of its outputs."""
        rank, made = self._mesh.rank, {node.node: node for node in self.nodes}
        outputs = (made[name] for name in self._graph.nodes[-1].inputs if name in made)
        shapes = [layout.box(rank).shape for node in outputs for layout in node.outputs]
        inputs = (size for node in self._graph.inputs for size in made[node.name].bytes_outputs(rank))
        return sum(inputs), sum(torch.int64.itemsize * math.prod(shape[:1] + shape[2:]) for shape in shapes)


def node_kind(op: str) -> str:
    """What a node calls, without the number of dims: `conv` for Conv2d and conv3d."""
    name = op.lower()
    return name[:-2] if name[-2:] in ("1d", "2d", "3d") else name


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (Dry, torch.Tensor)) for leaf in tree_leaves(value))
