"""What a strategy does to attention: attention of the shape that a user types is planned, lowered and priced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convmesh.errors import PlanError
from convmesh.lowering.lower import lower_plan
from convmesh.oracle import predict_programs
from convmesh.oracle.memory.peak import memory_of
from convmesh.planner.planning import plan
from convmesh.planner.predicting import representatives
from convmesh.plans import Program, Transfer
from convmesh.plans.default_mesh import mesh_for
from convmesh.plans.plan import Attention
from convmesh.plans.program_table import amount
from convmesh.system import System
from convmesh.system.units import shown

EXAMPLE = "attention 8 on 2x4096x512"
_TYPED = re.compile(r"attention\s+(\d+)\s+on\s+(\d+)[x×](\d+)[x×](\d+)")

ABOUT = {
    "data": "every rank has all weights and some samples",
    "spatial": "every rank has all weights and a part of the tokens, whose queries look at the keys of all ranks",
    "filter": "every rank has some heads: their rows of the projections, their columns of the last layer",
    "channel": "every rank has some heads: their rows of the projections, their columns of the last layer",
    "pipeline": "every rank has some layers; attention is whole in one of them",
    "hybrid": "every rank has all weights and some samples",
}
WAYS: Mapping[Attention, str] = {
    "gather": "keys and values of all ranks are gathered and kept for backward; their gradients are summed back",
    "ring": "keys and values pass round, now and again in backward; no rank has them all, and turns overlap",
}


@dataclass(frozen=True)
class AttentionSpec:
    """Heads, and the global input."""

    heads: int
    given: tuple[int, int, int]
    """Samples, tokens, features."""

    def __str__(self) -> str:
        return f"attention {self.heads} on {'x'.join(map(str, self.given))}"


@dataclass(frozen=True)
class WayExplained:
    """One way to look at all keys: what one rank has and sends."""

    parts: Mapping[str, tuple[int, ...]]
    """By layer: the shape of what the rank has of its output."""
    sent: Mapping[str, tuple[int, int]]
    """By layer: bytes in forward and in backward."""
    bytes_weights: int
    bytes_memory: int
    seconds: float | None

    @property
    def bytes_sent(self) -> int:
        return sum(map(sum, self.sent.values()))


@dataclass(frozen=True)
class AttentionExplanation:
    """Attention under a strategy, in each way that makes a difference."""

    strategy: str
    layer: AttentionSpec
    mesh: str
    rank: int
    ways: Mapping[Attention, WayExplained]

    def __str__(self) -> str:
        about = "; ".join(ABOUT[part] for part in self.strategy.split("+"))
        lines = [f"{self.layer} under {self.strategy}, {self.mesh}", about]
        for way, explained in self.ways.items():
            lines += ["", f"{way}: {WAYS[way]}"] if len(self.ways) > 1 else [""]
            lines.append(f"  {'layer':36} {f'rank {self.rank} has':>16} {'forward':>12} {'backward':>12}")
            for layer, shape in explained.parts.items():
                there, back = (amount(size) for size in explained.sent[layer])
                lines.append(f"  {layer:36} {'x'.join(map(str, shape)):>16} {there:>12} {back:>12}")
            time = "" if explained.seconds is None else f"; a step takes {shown(explained.seconds, 's')}"
            held = f"weights {amount(explained.bytes_weights)}, peak {amount(explained.bytes_memory)}"
            lines.append(f"  sends {amount(explained.bytes_sent)} in a step; holds {held}{time}")
        return "\n".join(lines)

    def to_plain(self) -> dict[str, Any]:
        """As plain data."""
        ways = {way: {**vars(explained), "bytes_sent": explained.bytes_sent} for way, explained in self.ways.items()}
        return {
            **{key: str(getattr(self, key)) for key in ("strategy", "layer", "mesh")},
            "rank": self.rank,
            "ways": ways,
        }


def parse_attention(text: str) -> AttentionSpec:
    """`attention 8 on 2x4096x512`: heads on samples x tokens x features."""
    match = _TYPED.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"`layer` (={text!r}) must be heads on samples x tokens x features: {EXAMPLE!r}.")
    heads, *given = map(int, match.groups())
    if not all((heads, *given)) or given[2] % heads:
        raise PlanError(f"`layer` (={text!r}): {given[2]} features do not divide over {heads} heads; try {EXAMPLE!r}.")
    return AttentionSpec(heads, (given[0], given[1], given[2]))


def explain_attention(
    strategy: str, layer: AttentionSpec, ranks: int, system: System | None = None
) -> AttentionExplanation:
    """What each rank has of an attention's layers and sends for them; `ring` is shown where tokens are cut."""
    mesh = mesh_for(strategy, ranks, 1)
    with torch.device("meta"):
        net = _Attends(layer)
    device, rank = system.torch_device if system else "cuda", representatives(mesh)[0]
    ways: dict[Attention, WayExplained] = {}
    for way in WAYS:
        made = plan(net, layer.given, mesh, strategy, attention=way, system=system)
        explained = _explained(lower_plan(made, rank, device).program, system)
        if not ways or explained != ways["gather"]:
            ways[way] = explained
    return AttentionExplanation(strategy, layer, str(mesh), rank, ways)


class _Attends(nn.Module):
    """Attention after a norm, so that its input learns, with a residual connection."""

    def __init__(self, layer: AttentionSpec) -> None:
        super().__init__()
        features = layer.given[2]
        self.norm, self.attend = nn.LayerNorm(features), nn.MultiheadAttention(features, layer.heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        seen: torch.Tensor = self.attend(y, y, y, need_weights=False)[0]
        return x + seen


def _explained(program: Program, system: System | None) -> WayExplained:
    shown_nodes = [node for node in program.nodes if node.weights or node.kind == "scaled_dot_product_attention"]
    return WayExplained(
        parts={node.layer: node.outputs[0].box(program.rank).shape for node in shown_nodes},
        sent={node.layer: (_bytes(node.forward), _bytes(node.backward)) for node in shown_nodes},
        bytes_weights=program.bytes_weights,
        bytes_memory=memory_of(program).bytes_peak,
        seconds=predict_programs({program.rank: program}, system).seconds_step if system else None,
    )


def _bytes(steps: Any) -> int:
    return sum(step.bytes_sent for step in steps if isinstance(step, Transfer))
