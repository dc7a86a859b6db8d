"""The operator table of a device: measured times of operators at ranks' local shapes, saved and reused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from convmesh.errors import SystemFileError

VERSION = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """One operator at its local shapes: the call, its FLOPs and bytes, and its time."""

    call: str
    """The call as written in a program's `Work`."""
    dtype: str
    inputs: tuple[tuple[int, ...], ...]
    flops: int
    bytes_moved: int
    seconds: float
    """Median device time."""
    spread: float
    """Half the range of most repeats, as a fraction of the median."""
    seconds_host: float = 0.0
    """Time until the host could launch the next operator, for a device that runs asynchronously."""
    active: int = 1
    """Ranks of the host that ran the same operator at once."""

    @property
    def op(self) -> str:
        return self.call.partition(".")[0]


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """An optimiser's step: seconds per tensor and per element."""

    seconds_tensor: float
    seconds_element: float
    seconds_host_tensor: float = 0.0
    active: int = 1


TUNED = "tuned"
"""The operator of the timings that `tuned_call` names."""


def tuned_call(call: str) -> str:
    """How the table names a call that a compiled step makes by a kernel of our own."""
    return f"{TUNED}.{call}"


def update_key(optimizer: str, dtype: str, active: int = 1) -> str:
    """`momentum float32`, or `momentum float32 x4` if four ranks were active."""
    return f"{optimizer} {dtype}" + (f" x{active}" if active > 1 else "")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Host time of the runtime's Python outside operators."""

    seconds_forward: float = 0.0
    """For each node of an unmeasured kind."""
    seconds_backward: float = 0.0
    seconds_step: float = 0.0
    """Once per step: placing inputs, checking the loss, clearing gradients."""
    waits_for_loss: bool = False
    """Whether the host waits for the device after forward, because it checks the loss."""
    kinds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Forward and backward time of a node, by its kind: `conv`, `batchnorm`, `cat`. A node that sends takes longer,
    depending on what its transfers cut: `conv space`, `conv channels`, `batchnorm samples`."""
    seconds_sending: float = 0.0
    """Extra time, in forward and in backward, of a node that sends and whose kind and cut were not measured."""
    nodes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Forward and backward time of a node among others, the launches of its operators included, by its kind; under
    autocast `conv amp`. Where known, it replaces the times of `kinds` and of operators."""
    seconds_step_nodes: float = 0.0
    """Time of a step apart from its nodes, where nodes are timed this way."""
    seconds_replay: float = 0.0
    """Time of a compiled step, whose operators are launched as graphs."""
    seconds_replay_weight: float = 0.0
    """Additional time of a compiled step for each of its weights."""

    def among_others(self, kind: str, works: int, precision: str, phase: int) -> float | None:
        """The whole time of a node with `works` operators; None where nodes were not timed this way.

        A kind that was not timed takes as long as relu for each of its operators.
        """
        suffix = " amp" if precision and f"{kind or 'relu'} amp" in self.nodes else ""
        if seconds := self.nodes.get(f"{kind}{suffix}"):
            return max(0.0, seconds[phase])
        one, none = self.nodes.get("relu"), self.nodes.get("identity")
        if one is None or none is None:
            return None
        return max(0.0, none[phase]) + works * max(0.0, one[phase] - none[phase])

    def forward(self, kind: str, cut: str | None = None) -> float:
        """Time of one node; `cut` is what its transfers cut, None if it has no transfers."""
        return self._node(kind, cut, 0, self.seconds_forward)

    def backward(self, kind: str, cut: str | None = None) -> float:
        return self._node(kind, cut, 1, self.seconds_backward)

    def _node(self, kind: str, cut: str | None, phase: int, default: float) -> float:
        if cut and (split := self.kinds.get(f"{kind} {cut}")):
            return split[phase]
        alone = self.kinds[kind][phase] if kind in self.kinds else default
        return alone + (self.seconds_sending if cut else 0.0)


@dataclass(frozen=True)
class OperatorTable:
    """`table.find(work.call)`: timings of one kind of device, by call and number of active ranks."""

    device: str
    timings: tuple[Timing, ...]
    updates: Mapping[str, UpdateTiming] = field(default_factory=dict)
    """By optimiser, number format and number of active ranks: see `update_key`."""
    overheads: Overheads = Overheads()
    about: Mapping[str, str] = field(default_factory=dict)
    """Machine, date, versions."""

    @cached_property
    def _by_call(self) -> dict[tuple[str, int], Timing]:
        return {(timing.call, timing.active): timing for timing in self.timings}

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str, int], list[Timing]]:
        by_kind: dict[tuple[str, str, int], list[Timing]] = {}
        for timing in self.timings:
            by_kind.setdefault((timing.op, timing.dtype, timing.active), []).append(timing)
        return by_kind

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Numbers of active ranks for which operators were timed."""
        return tuple(sorted({timing.active for timing in self.timings}))

    def find(self, call: str, active: int = 1) -> Timing | None:
        """The timing of exactly this call."""
        return self._by_call.get((call, active))

    def update(self, optimizer: str, dtype: str, active: int = 1) -> UpdateTiming | None:
        """An optimiser's step with this many active ranks, else with one, if timed."""
        return self.updates.get(update_key(optimizer, dtype, active)) or self.updates.get(update_key(optimizer, dtype))

    def of_kind(self, op: str, dtype: str, active: int = 1) -> list[Timing]:
        """Timings of one operator on one number format."""
        return self._by_kind.get((op, dtype, active), [])

    def merged(self, other: OperatorTable) -> OperatorTable:
        """The timings of both tables; `other` wins where both have one."""
        if other.device != self.device:
            raise SystemFileError(
                f"tables of {self.device!r} and {other.device!r} cannot be merged: they are of two devices."
            )
        timings = {**self._by_call, **other._by_call}.values()
        return replace(other, timings=tuple(timings), updates={**self.updates, **other.updates})

    def without(self, calls: Iterable[str]) -> OperatorTable:
        """The table without these calls."""
        left_out = set(calls)
        return replace(self, timings=tuple(t for t in self.timings if t.call not in left_out))

    def save(self, path: str | Path) -> None:
        """Write JSON; compressed if the name ends in .gz."""
        text = json.dumps(self._plain(), separators=(",", ":"))
        data = text.encode()
        Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    def _plain(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "device": self.device,
            "about": dict(self.about),
            "overheads": asdict(self.overheads),
            "updates": {name: asdict(timing) for name, timing in self.updates.items()},
            "columns": [f.name for f in fields(Timing)],
            "timings": [astuple(timing) for timing in self.timings],
        }

    @classmethod
    def load(cls, path: str | Path) -> OperatorTable:
        """Read a table written by `save`."""
        data = Path(path).read_bytes()
        try:
            return cls._of(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
            fix = "recreate it with `convmesh calibrate`"
            raise SystemFileError(f"{Path(path).name}: not an operator table ({error}); {fix}.") from None

    @classmethod
    def _of(cls, plain: Mapping[str, Any]) -> OperatorTable:
        if plain["version"] != VERSION:
            raise ValueError(f"version {plain['version']!r}, not {VERSION}")
        rows = (dict(zip(plain["columns"], row, strict=True)) for row in plain["timings"])
        timings = (Timing(**{**row, "inputs": tuple(map(tuple, row["inputs"]))}) for row in rows)
        updates = {name: UpdateTiming(**timing) for name, timing in plain["updates"].items()}
        overheads = dict(plain["overheads"])
        for field_name in ("kinds", "nodes"):
            overheads[field_name] = {name: tuple(times) for name, times in overheads.get(field_name, {}).items()}
        return cls(plain["device"], tuple(timings), updates, Overheads(**overheads), plain["about"])
