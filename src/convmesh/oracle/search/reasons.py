"""Why the best plan of a search is the best, in sentences."""

from __future__ import annotations

from convmesh.oracle.search.found import Found, Ranked
from convmesh.plan.presets import AXES_OF

SIMPLE = ("data", "spatial", "filter", "channel", "pipeline")
"""Strategies of which others are made."""


def why(found: Found) -> list[str]:
    """Where the winner's time goes, what the next strategy loses against it, and what simpler ones lack."""
    best = found.best
    return [_spent(best), *_against(found, best), *_simpler(found, best)]


def _spent(best: Ranked) -> str:
    parts = best.prediction.parts
    whole = parts.step.value or 1.0
    shares = {
        "computes": parts.compute.value + parts.update.value,
        "waits for transfers": parts.exposed.value,
        "is idle": parts.idle.value,
    }
    told = ", ".join(f"{what} {value / whole:.0%}" for what, value in shares.items() if value >= 0.005 * whole)
    hidden = f"; {parts.hidden.value * 1e3:.3g} ms of transfers run behind that" if parts.hidden.value > 0 else ""
    return f"{best.strategy} {told} of a step's {whole * 1e3:.4g} ms{hidden}"


def _against(found: Found, best: Ranked) -> list[str]:
    other = next((r for r in found.plans if r.strategy != best.strategy), None)
    if other is None:
        return []
    mine, theirs = best.prediction.parts, other.prediction.parts
    names = ("compute", "exposed", "idle", "update")
    losses = {name: getattr(theirs, name).value - getattr(mine, name).value for name in names}
    most = max(losses, key=lambda name: losses[name])
    words = {"compute": "computation", "exposed": "exposed communication", "idle": "idle time", "update": "the update"}
    ratio = found.objective.of(other.prediction) / found.objective.of(best.prediction) - 1
    loss = f", most of all {losses[most] * 1e3:.3g} ms of {words[most]}" if losses[most] > 0 else ""
    return [f"the next strategy, {other.strategy} on {other.mesh}, needs {ratio:.1%} more {found.objective.name}{loss}"]


def _simpler(found: Found, best: Ranked) -> list[str]:
    """Of every strategy for some of the winner's axes alone, what it costs more or why it cannot be."""
    simple = [name for name in SIMPLE if {*AXES_OF[name]} & {*best.mesh.axes} and name != best.strategy]
    told = {name: _alone(found, best, name) for name in simple}
    return [f"{strategy} alone {why}" for strategy, why in told.items() if why]


def _alone(found: Found, best: Ranked, strategy: str) -> str | None:
    cost = found.objective.of
    if made := next((r for r in found.plans if r.strategy == strategy), None):
        return f"needs {cost(made.prediction) / cost(best.prediction) - 1:.1%} more {found.objective.name}"
    reason = next((one.reason for one in found.rejected if one.strategy == strategy), None)
    return reason and f"cannot be: {reason.removeprefix(f'{strategy}: ')}"
