"""Single nodes of a network, lowered for given layouts of their inputs: mixes of splits are built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from convmesh.errors import ConvMeshError
from convmesh.graph import Captured, Node, Weight
from convmesh.layout import Layout
from convmesh.lowering.arrange import Role, arranged_layout, input_layout, role_of
from convmesh.lowering.assembly import Assembly
from convmesh.lowering.dry_call import ArrangeCall
from convmesh.lowering.dry_values import Dry, DryResult
from convmesh.lowering.graph_walk import Lowering
from convmesh.lowering.weight_cuts import Axes, Cuts, DecidedCuts
from convmesh.plans import Plan, Split
from convmesh.plans.fused.fused_program import fused_alone
from convmesh.plans.steps import Steps
from convmesh.private_torch import flat_arguments, tree_leaves

Value = Any
"""What a node returns, with `Dry` in place of tensors."""


@dataclass(frozen=True)
class Single:
    """One node for given inputs: its outputs, its steps, what it keeps for backward, and its use of weights."""

    value: Value
    steps: tuple[Steps, ...]
    bytes_kept: int
    cuts: Mapping[str, Cuts]
    sums: Mapping[str, Axes]


class SingleLowering(Lowering):
    """Lowers nodes one by one, each for many layouts; calls that are alike run once."""

    def __init__(self, captured: Captured, plan: Plan, rank: int, device: str) -> None:
        super().__init__(captured, plan, rank, device=device)
        self.run()
        self.nodes = {node.name: node for node in captured.module.graph.nodes}
        self._joint = frozenset()  # nodes are looked at one by one
        self.values = dict(self._env)
        """Values under the plan that it was made with; sizes and numbers are the same for all plans."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self._captured.graph.weights

    def has_tensors(self, name: str) -> bool:
        return any(isinstance(leaf, Dry) for leaf in tree_leaves(self.values.get(name)))

    def input(self, name: str, user: Node, split: Split) -> Dry:
        """An input as a user with such a split wants it."""
        value: Dry = self.values[name]
        whole = Layout.of(self._plan.mesh, value.layout.shape)
        return replace(value, layout=input_layout(whole, name, user, split))

    def likeness(self, name: str, sources: Sequence[str], splits: Sequence[Split | None]) -> Any:
        """What distinguishes a node under these splits, apart from the values of `sources`; None if it is unique."""
        node, spec = self.nodes[name], self._captured.graph.node(name)
        called = node.target
        if (module := self._module_of(node)) is not None:
            called = self._cache.module_key(spec.layer, module)
        if called is None or any(weight.name.rpartition(".")[0] != spec.layer for weight in spec.weights):
            return None
        leaves, _, nesting = flat_arguments(node.args, dict(node.kwargs))
        given = [self._told(leaf, sources) for leaf in leaves]
        if None in given:
            return None
        blocks = tuple(self._blocks(spec, split) for split in splits)
        return node.op, called, spec.kind, spec.channels_last, nesting, tuple(given), tuple(splits), blocks

    def _told(self, leaf: Any, sources: Sequence[str]) -> Any:
        """An argument: which of `sources` it is, or a number; None for a tensor of the node's own."""
        if not isinstance(leaf, fx.Node):
            return None if isinstance(leaf, torch.Tensor) else repr(leaf)
        if leaf.name in sources:
            return sources.index(leaf.name)
        value = self.values.get(leaf.name)
        return None if any(isinstance(part, (Dry, torch.Tensor)) for part in tree_leaves(value)) else repr(value)

    def single(self, name: str, given: Mapping[str, Value], split: Split | None) -> Single | None:
        """A node for given inputs, under a split if it takes one; None if that is impossible."""
        node, spec = self.nodes[name], self._captured.graph.node(name)
        self._env = {**self.values, **given}
        self._weights, self._made = DecidedCuts(), {}
        self._assembly = Assembly(self._captured, self._plan, self._mesh, self._weights)
        try:
            moved = self._moved(node, split) if split is not None else None
            if split is not None:
                self._plan = replace(self._plan, splits=((spec.layer, split),))
            self._call(node, spec)
        except (ConvMeshError, ValueError):
            return None
        made = fused_alone(self._assembly.nodes[-1])
        steps = (made.forward, made.backward)
        return Single(
            value=self._env[name],
            steps=steps if moved is None else (moved.forward, *steps, moved.backward),
            bytes_kept=sum(saved.bytes_kept for saved in made.saved if saved.what != "weight"),
            cuts=self._weights.cuts,
            sums={weight: uses[0][1] for weight, uses in self._assembly.uses.items()},
        )

    def _moved(self, node: fx.Node, split: Split) -> DryResult | None:
        """Change the first input's layout to what the split asks for, separately from the node's own call."""
        source = next((leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node)), None)
        if source is None or not isinstance(self._env[source.name], Dry):
            return None
        given: Dry = self._env[source.name]
        layout = arranged_layout(given.layout, split, self._role(node))
        if layout == given.layout:
            return None
        moved = self._runner.run(ArrangeCall(layout.cuts), ((given,), {}))
        self._env[source.name] = moved.value
        return moved

    def _role(self, node: fx.Node) -> Role:
        return role_of(self._module_of(node))
