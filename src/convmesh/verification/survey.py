"""All layers of a network that cannot run under a plan, found by a dry run that does not stop at the first."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from convmesh.errors import UnsupportedError
from convmesh.graph import Captured, Node
from convmesh.graph.tracing.node_meta import line_of
from convmesh.layout import Layout
from convmesh.lowering.dry_values import Dry
from convmesh.lowering.graph_walk import Lowering
from convmesh.ops.core.registry import has_handler, tensor_method
from convmesh.plans import Plan
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.verification.result import Unsupported

_LISTING = re.compile(r"Use one of: [^;]*;")
"""A list of some hundred names, too long for one line."""


def unsupported(captured: Captured, plan: Plan) -> tuple[Unsupported, ...]:
    """Every layer without a split version for this plan; nothing runs and nothing is sent."""
    survey = _Survey(captured, plan, rank=0, samples=None)
    return tuple(survey.missing())


class _Survey(Lowering):
    """A lowering that notes what it cannot split and continues with a tensor of the right shape."""

    def missing(self) -> list[Unsupported]:
        """Visit every node and lower nothing else."""
        self._missing: list[Unsupported] = []
        for node in self._captured.module.graph.nodes:
            self._visit(node, self._captured.graph.node(node.name))
        return self._missing

    def _call(self, node: fx.Node, spec: Node) -> None:
        try:
            self._refuse_unknown(node, spec)
            super()._call(node, spec)
        except Exception as error:  # whatever a layer raises, it cannot run
            self._missing.append(Unsupported(spec.layer, spec.op, _reason(spec, error), line_of(node)))
            self._env[node.name] = self._assumed(node)

    def _refuse_unknown(self, node: fx.Node, spec: Node) -> None:
        """An unknown function may mix samples, so it never runs on shards; an unknown module may.

        A model that nothing can look into says so itself, with the line.
        """
        if "line" in spec.options:
            return
        if spec.kind != "opaque" or node.op == "call_module" or not self._given(node) or _has_split_version(node):
            return
        raise UnsupportedError(
            f"`{spec.op}` has no split version; write it with functions that have one: `convmesh.ops.supported()` "
            "lists them."
        )

    def _given(self, node: fx.Node) -> list[Dry]:
        return [x for n in node.all_input_nodes for x in tree_leaves(self._env[n.name]) if isinstance(x, Dry)]

    def _assumed(self, node: fx.Node) -> Any:
        """The node's assumed output: cut like its input if the shapes agree, otherwise by samples."""
        given = self._given(node)

        def dry(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not given:
                return value
            return Dry(_layout_like(given[0].layout, tuple(value.shape)), value.dtype, value.is_floating_point())

        return tree_map(dry, self._captured.values[node.name])


def _has_split_version(node: fx.Node) -> bool:
    if node.op == "call_method":
        return tensor_method(str(node.target)) is not None
    return callable(node.target) and has_handler(node.target)


def _layout_like(given: Layout, shape: tuple[int, ...]) -> Layout:
    if shape == given.shape:
        return given
    whole = Layout.of(given.mesh, shape)
    return whole.replacing({0: given.cuts[0]}) if shape and given.cuts and shape[0] == given.shape[0] else whole


def _reason(spec: Node, error: Exception) -> str:
    """The message without the layer's name, which is shown separately."""
    text = (
        _LISTING.sub("`convmesh.ops.supported()` lists what has one;", str(error))
        if isinstance(error, UnsupportedError)
        else f"{type(error).__name__}: {error}"
    )
    return text.split(": ", 1)[-1] if text.startswith(f"layer {spec.layer!r} ({spec.op})") else text
