"""Everything in a network that has no split version, at once: what happens to it, when, and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from convmesh.errors import CaptureWarning, ConvMeshError
from convmesh.graph import Captured, capture
from convmesh.graph.tracing.node_meta import line_of
from convmesh.plans.default_mesh import mesh_for
from convmesh.verification import Unsupported
from convmesh.verification.survey import unsupported
from convmesh.verification.undecided_plan import draft_of

STRATEGIES = ("data", "spatial", "filter", "channel")
"""What each cuts: samples, space, the filters of layers, their input channels."""

RANKS, BATCH = 2, 2

Fate = Literal["closed", "refused"]


@dataclass(frozen=True)
class ModelFinding:
    """A call that cannot be split: closed ones run on whole samples, refused ones not at all."""

    layer: str
    op: str
    line: str
    fate: Fate
    under: tuple[str, ...]
    """The strategies that refuse it, or that leave a closed layer whole."""
    reason: str
    advice: str


@dataclass(frozen=True)
class ModelReport:
    """All findings about a network, and the strategies under which none of its layers is refused."""

    findings: tuple[ModelFinding, ...]
    works_under: tuple[str, ...]
    problems: dict[str, str]
    """Strategies that do not fit the network as a whole, and why."""

    @property
    def ok(self) -> bool:
        return bool(self.works_under)

    def to_plain(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def examine_model(model: nn.Module, sample: tuple[int, ...]) -> ModelReport:
    """The parts of `model`, called with batches of `sample`, that cannot be split over two ranks; nothing runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # closed layers are among the findings
        captured = capture(model, (BATCH, *sample), check=False)
    refused: dict[str, tuple[Unsupported, ...]] = {}
    problems: dict[str, str] = {}
    for strategy in STRATEGIES:
        try:
            plan = draft_of(captured, mesh_for(strategy, RANKS, len(sample) - 1), strategy)
            refused[strategy] = unsupported(captured, plan)
        except ConvMeshError as error:
            problems[strategy] = str(error)
    works = tuple(strategy for strategy, layers in refused.items() if not layers)
    never = {layer.layer for layers in refused.values() for layer in layers}
    return ModelReport((*_closed(captured, never), *_refused(refused, works)), works, problems)


def _closed(captured: Captured, refused: set[str]) -> Iterable[ModelFinding]:
    """Modules that could not be traced and run on whole samples."""
    nodes = {captured.graph.node(node.name).layer: node for node in captured.module.graph.nodes if node.op != "output"}
    for layer, why in captured.graph.opaque.items():
        if layer in refused:
            continue
        node = nodes.get(layer)
        spec = None if node is None else captured.graph.node(node.name)
        yield ModelFinding(
            layer=layer or "(the model)",
            op="" if spec is None else spec.op,
            line="" if node is None else line_of(node),
            fate="closed",
            under=tuple(strategy for strategy in STRATEGIES if strategy != "data"),
            reason=why,
            advice="It runs on whole samples: keep it small, or take what depends on values out of its forward.",
        )


def _refused(refused: dict[str, tuple[Unsupported, ...]], works: tuple[str, ...]) -> Iterable[ModelFinding]:
    """One finding for each call and reason, with all strategies that share it."""
    together: dict[Unsupported, list[str]] = {}
    for strategy, layers in refused.items():
        for layer in layers:
            together.setdefault(layer, []).append(strategy)
    for layer, under in together.items():
        yield ModelFinding(
            layer.layer, layer.op, layer.line, "refused", tuple(under), layer.reason, _advice(under, works)
        )


def _advice(under: list[str], works: tuple[str, ...]) -> str:
    others = [strategy for strategy in STRATEGIES if strategy not in under]
    if works:
        return f"Nothing is refused under {' or '.join(works)}."
    if others:
        return f"It is not refused under {' or '.join(others)}."
    return (
        "Write it with functions that have a split version (docs/support.md lists them), or move it behind the network."
    )
