"""A prediction as plain values and as a page to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from convmesh.oracle.pricing.estimate import Estimate
from convmesh.plans.program_table import amount

if TYPE_CHECKING:
    from convmesh.oracle.prediction import Prediction

PARTS = {
    "compute": "computation",
    "exposed": "exposed communication",
    "idle": "idle",
    "update": "optimiser",
    "hidden": "hidden communication",
}
"""The parts of a step and their names on a page; hidden communication overlaps computation."""

SLOWEST = 5
"""Layers on a page."""


def plain(prediction: Prediction) -> dict[str, Any]:
    """Ready for JSON."""
    parts = prediction.parts
    return {
        "mesh": dict(prediction.mesh.axes),
        "system": prediction.system.name,
        "seconds_step": prediction.seconds_step,
        "seconds": _estimate(prediction.seconds),
        "parts": {name: _estimate(getattr(parts, name)) for name in PARTS},
        "bytes_memory": prediction.bytes_memory,
        "memory": {str(rank): _memory(memory) for rank, memory in prediction.memory.items()},
        "bytes_sent": prediction.bytes_sent,
        "sent": {str(rank): {"*".join(a): n for a, n in sent.items()} for rank, sent in prediction.sent.items()},
        "joules_step": prediction.joules_step,
        "joules": _estimate(prediction.joules),
        "energy": {name: _estimate(part) for name, part in prediction.energy.parts.items()},
        "grams_co2_step": prediction.energy.grams_co2.value,
        "dollars_step": prediction.energy.dollars,
        "slowest_layers": [
            {"layer": layer, "phase": phase, "seconds": seconds}
            for (layer, phase), seconds in slowest_layers(prediction)
        ],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "basis": estimate.basis}


def _memory(memory: Any) -> dict[str, Any]:
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "peak")
    return {**{f"bytes_{name}": getattr(memory, f"bytes_{name}") for name in names}, "layer": memory.layer}


def slowest_layers(prediction: Prediction, count: int = SLOWEST) -> list[tuple[tuple[str, str], float]]:
    """The layers and phases that take longest to compute on the slowest rank."""
    spent = prediction.timeline.seconds_by_layer(prediction.parts.rank)
    return [(key, seconds) for key, seconds in spent.items() if key[0]][:count]


def page(prediction: Prediction) -> str:
    """Time by parts, memory, traffic and energy, each with its interval and basis."""
    return "\n".join(_lines(prediction))


def _lines(prediction: Prediction) -> Iterator[str]:
    ranks = prediction.mesh.size
    yield f"{prediction.mesh}, {ranks} rank{'s' * (ranks > 1)} on {prediction.system.name}"
    yield ""
    yield _row("step", prediction.seconds)
    for name, called in PARTS.items():
        part: Estimate = getattr(prediction.parts, name)
        if part.value or name in ("compute", "exposed"):
            share = part.value / prediction.seconds_step if prediction.seconds_step else 0.0
            yield _row(f"  {called}", part) + f"  {share:6.1%}{' overlapped' * (name == 'hidden')}"
    yield ""
    yield from _held(prediction)
    yield from _sent(prediction)
    joules = prediction.joules
    yield f"energy of a step: {joules.value:.4g} J ({joules.low:.3g} to {joules.high:.3g}, {joules.basis})"
    drawn = ", ".join(f"{name} {part.value:.3g} J" for name, part in prediction.energy.parts.items())
    yield f"  {drawn}; {prediction.energy.grams_co2.value:.3g} g CO2"
    slow = slowest_layers(prediction)
    if slow:
        yield f"slowest layers on rank {prediction.parts.rank}:"
        yield from (f"  {layer} {phase}: {duration(seconds)}" for (layer, phase), seconds in slow)


def _row(name: str, estimate: Estimate) -> str:
    between = f"{duration(estimate.low)} to {duration(estimate.high)}"
    return f"{name:<24}{duration(estimate.value):>10}  {between:<22} {estimate.basis:<12}"


def _held(prediction: Prediction) -> Iterator[str]:
    rank, memory = max(prediction.memory.items(), key=lambda item: item[1].bytes_peak)
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    listed = ", ".join(f"{name} {amount(getattr(memory, f'bytes_{name}'))}" for name in parts)
    yield f"memory of rank {rank}: {amount(memory.bytes_peak)} at layer {memory.layer!r} ({listed})"


def _sent(prediction: Prediction) -> Iterator[str]:
    rank, sent = max(prediction.sent.items(), key=lambda item: sum(item[1].values()))
    listed = ", ".join(f"over {'*'.join(axes)} {amount(n)}" for axes, n in sent.items() if n)
    yield f"sent by rank {rank}: {amount(sum(sent.values()))}{f' ({listed})' if listed else ''}"


def duration(seconds: float) -> str:
    """Seconds, with a unit."""
    for limit, unit in ((1e-3, "us"), (1.0, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * (1e6 if unit == 'us' else 1e3):.3g} {unit}"
    return f"{seconds:.3g} s"
