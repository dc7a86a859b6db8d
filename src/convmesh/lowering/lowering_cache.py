"""Results of lowering one network, cached with its capture: shapes, steps and layouts, never a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import fx, nn

from convmesh.graph import Captured
from convmesh.kernels.memory_format import is_channels_last
from convmesh.lowering.dense_functions import stand_in, tensor_at, weights_of_call
from convmesh.lowering.dry_run import DryRuns
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.node_calls import module_key
from convmesh.lowering.recent_results import RecentResults
from convmesh.plans import Plan
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.module_tables import buffers_of, parameters_of, parts_of

MOST_LOWERED = 256
"""Lowered plans kept for a network: a search returns to the best few."""


MOST_STATES = 4
"""States of a network that are cached separately: training and evaluation, before and after a change of types."""


class Problem(NamedTuple):
    """A plan to lower for a rank, for a number of samples (None: the plan's own) on a kind of device."""

    plan: Plan
    rank: int
    samples: int | None
    device: str
    of_stage: bool = False
    """Whether the rank's own stages of a pipeline are wanted, not all layers."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What lowering depends on: a plan's strategy and notes change nothing."""
        p = self.plan
        kept = (p.batchnorm, p.pipeline, p.checkpoint, p.summing, p.sub_batches, p.attention, p.precision, p.compile)
        chosen = (p.mesh, p.splits, *kept)
        return *chosen, self.rank, self.samples, self.device, self.of_stage


@dataclass(frozen=True)
class LoweringCache:
    """Lowered plans of a network in one state, and the dry runs that plans share."""

    takes_channels_last: bool
    """Whether inputs come with channels innermost, like the weights."""
    dry_runs: DryRuns = field(default_factory=DryRuns)
    _lowered: RecentResults[Any, Lowered] = field(default_factory=lambda: RecentResults(MOST_LOWERED))
    _module_keys: dict[str, Any] = field(default_factory=dict)
    _arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _stand_ins: dict[str, nn.Linear | None] = field(default_factory=dict)

    def lowered(self, problem: Problem, lower: Callable[[], Lowered]) -> Lowered:
        """The lowered plan, cached or made now. It is also cached for the plan with all choices made."""
        known = self._lowered.get(problem.key)
        if known is None:
            known = lower()
            known = replace(known, plan=replace(known.plan, source=None))  # which would keep this cache alive
            self._lowered[problem.key] = known
            self._lowered[problem._replace(plan=known.plan).key] = known
        return replace(known, plan=replace(problem.plan, splits=known.plan.splits))

    def argument_names(self, node: fx.Node) -> tuple[str, ...]:
        """The nodes among a node's arguments, in order, with repeats."""
        if node.name not in self._arguments:
            leaves = tree_leaves((node.args, dict(node.kwargs)))
            self._arguments[node.name] = tuple(leaf.name for leaf in leaves if isinstance(leaf, fx.Node))
        return self._arguments[node.name]

    def stand_in(self, node: fx.Node, root: nn.Module) -> nn.Linear | None:
        """The layer that stands for a call of `F.linear` on weights of the network."""
        if node.name not in self._stand_ins:
            paths = weights_of_call(node)
            self._stand_ins[node.name] = stand_in({name: tensor_at(root, path) for name, path in paths.items()})
        return self._stand_ins[node.name]

    def module_key(self, path: str, module: nn.Module) -> Any:
        """What distinguishes calls of one module of the network from those of others."""
        if path not in self._module_keys:
            self._module_keys[path] = module_key(module)
        return self._module_keys[path]


_PINNED = "lowering of an unchanged network"


@contextmanager
def unchanged_network(captured: Captured) -> Iterator[None]:
    """Assume that a network does not change inside the block: a search would otherwise check at every plan."""
    before = captured.derived.get(_PINNED)
    captured.derived[_PINNED] = cache_of(captured)
    try:
        yield
    finally:
        captured.derived[_PINNED] = before


def cache_of(captured: Captured) -> LoweringCache:
    """The cache of a captured network as it is now."""
    pinned: LoweringCache | None = captured.derived.get(_PINNED)
    if pinned is not None:
        return pinned
    caches = captured.derived.setdefault("lowering", RecentResults(MOST_STATES))
    state = _state(captured.module)
    cache: LoweringCache | None = caches.get(state)
    if cache is None:
        cache = caches[state] = LoweringCache(_takes_channels_last(captured.module))
    return cache


def share_dry_runs(known: Captured, other: Captured) -> None:
    """Let a network captured for another batch, and not lowered yet, use the dry runs of the first."""
    state = _state(other.module)
    if other is not known and _state(known.module) == state:
        caches = other.derived.setdefault("lowering", RecentResults(MOST_STATES))
        caches[state] = LoweringCache(_takes_channels_last(other.module), cache_of(known).dry_runs)


def _takes_channels_last(module: nn.Module) -> bool:
    return any(is_channels_last(parameter) for parameter in module.parameters())


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What may change about a network after capture: modes, types, memory order, and which weights learn."""
    parts = parts_of(module)
    tables = [table for part in parts for table in (parameters_of(part), buffers_of(part)) if table]
    tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
    described = tuple([(t.dtype, t.stride(), t.requires_grad) for t in tensors])
    return tuple([part.training for part in parts]), described
