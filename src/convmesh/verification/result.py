"""The result of a verification, as values that print themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from convmesh.layout.mesh import Mesh

Shapes = tuple[tuple[int, ...], ...]

Kind = Literal["output", "gradient", "weight gradient", "weight", "loss"]
"""What is compared: a layer's output and its gradient, the gradients of its weights in the first step, its weights
after the last step, and the loss of each step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one tensor from that of one process, relative to its largest value."""

    kind: Kind
    name: str
    """The weight's name, or the step's number."""
    error: float
    allowed: float
    """The effect of rounding: 1e-9, or a hundred times that of a change in the input's last digit."""
    rank: int = 0
    """The rank with the largest difference."""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    @property
    def what(self) -> str:
        """The tensor in words."""
        return {
            "output": "its output",
            "gradient": "the gradient of its output",
            "weight gradient": f"the gradient of {self.name}",
            "weight": f"{self.name} after training",
            "loss": f"the loss of step {self.name}",
        }[self.kind]

    def __str__(self) -> str:
        return f"{self.what} differs by {self.error:.2g} on rank {self.rank} (rounding explains {self.allowed:.1g})"


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """All comparisons of one layer's call."""

    layer: str
    node: str
    op: str
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    @property
    def error(self) -> float:
        """The difference furthest beyond what rounding explains."""
        return self.worst.error

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda d: d.error / d.allowed)

    def largest(self, kind: Kind) -> float | None:
        """The largest difference of one kind; None if there was nothing to compare."""
        return max((d.error for d in self.differences if d.kind == kind), default=None)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A layer that cannot run as the plan splits it."""

    layer: str
    op: str
    reason: str
    line: str = ""
    """Line of the user's code, if known: `net.py:12`."""

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.layer} ({self.op}){at}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first layer that differs."""

    layer: str
    what: str

    def __str__(self) -> str:
        return f"layer {self.layer!r}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether a plan trains as one process does, and if not, where the two first differ."""

    mesh: Mesh
    """The mesh that ran."""
    plan_mesh: Mesh
    shapes: Shapes
    """The shapes of the inputs that ran."""
    plan_shapes: Shapes
    steps: int
    layers: tuple[LayerCheck, ...] = ()
    first: Culprit | None = None
    losses: tuple[Difference, ...] = ()
    unsupported: tuple[Unsupported, ...] = ()
    failure: str = ""
    """Why the run failed, if it did."""
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and nothing differs."""
        failed = bool(self.unsupported or self.failure or self.first)
        exact = all(check.ok for check in self.layers) and all(loss.ok for loss in self.losses)
        return not failed and bool(self.layers) and exact

    @property
    def worst(self) -> LayerCheck | None:
        """The layer with the difference furthest from what rounding explains."""
        return max(self.layers, key=lambda check: check.worst.error / check.worst.allowed, default=None)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {row}" for row in self._details()), *(f"note: {n}" for n in self.notes)])

    @property
    def verdict(self) -> str:
        """The result in one line."""
        where = f"{self.mesh} with {' and '.join('x'.join(map(str, shape)) for shape in self.shapes)}"
        if self.unsupported:
            return f"cannot run: {len(self.unsupported)} layers have no split version for this plan on {self.plan_mesh}"
        if self.failure:
            return f"failed on {where}: {self.failure}"
        if self.ok and self.worst is not None:
            return (
                f"exact: {len(self.layers)} layers, {self.steps} steps on {where} equal one process "
                f"(largest difference {self.worst.error:.1g} at {self.worst.layer}; {self.seconds:.1f} s)"
            )
        return f"differs on {where}: {self.first or 'no layer could be compared'}"

    def _details(self) -> list[str]:
        if self.unsupported:
            return [str(layer) for layer in self.unsupported]
        bad = [check for check in self.layers if not check.ok]
        rows = [f"{check.layer} ({check.op}): {check.worst}" for check in bad[:10]]
        return rows + ([f"... and {len(bad) - 10} more layers"] if len(bad) > 10 else [])

    def to_plain(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "mesh": dict(self.mesh.axes),
            "plan_mesh": dict(self.plan_mesh.axes),
            "shapes": [list(shape) for shape in self.shapes],
            "plan_shapes": [list(shape) for shape in self.plan_shapes],
            "steps": self.steps,
            "seconds": self.seconds,
            "first": None if self.first is None else {"layer": self.first.layer, "what": self.first.what},
            "worst": None if self.worst is None else {"layer": self.worst.layer, "error": _plain(self.worst.error)},
            "layers": [_plain_check(check) for check in self.layers],
            "losses": [_plain(loss.error) for loss in self.losses],
            "unsupported": [{"layer": u.layer, "op": u.op, "reason": u.reason} for u in self.unsupported],
            "failure": self.failure,
            "notes": list(self.notes),
        }


def _plain_check(check: LayerCheck) -> dict[str, Any]:
    kinds: tuple[Kind, ...] = ("output", "gradient", "weight gradient", "weight")
    errors = {kind.replace(" ", "_"): _plain(check.largest(kind)) for kind in kinds}
    return {"layer": check.layer, "op": check.op, "ok": check.ok, **errors}


def _plain(number: float | None) -> float | None:
    """JSON has no infinity, so a tensor that is missing counts as a large number."""
    return number if number is None or math.isfinite(number) else 1e308
