"""Which rank holds up the others when none makes steps, and where each one is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.supervise.pulse import Sign
from convmesh.supervise.rank_process import RankProcess

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OURS, _CARRIERS = "/convmesh/", "/convmesh/dist/"
_TRANSFERS = (_CARRIERS[1:], "torch/distributed/")
"""Code in which a rank waits for others."""

MOST_TOLD = 8


@dataclass(frozen=True)
class Witness:
    """What is known about one rank of a job that hangs."""

    rank: int
    sign: Sign
    is_stopped: bool
    stacks: str

    @property
    def frames(self) -> list[tuple[str, str, str]]:
        """File, line and function of its main thread, innermost first: faulthandler writes the oldest thread last."""
        return _FRAME.findall(self.stacks.rpartition("hread ")[2])

    @property
    def waits_for_others(self) -> bool:
        return any(part in file for file, _, _ in self.frames for part in _TRANSFERS)

    @property
    def operation(self) -> str:
        """The innermost of our own functions, else the innermost of all.

        Those of `dist` come last: all transfers wait in the same few, so they do not tell which one it is.
        """
        frames = self.frames
        if not frames:
            return ""
        ours = [frame for frame in frames if _OURS in frame[0]]
        asked = [frame for frame in ours if _CARRIERS not in frame[0]]
        file, line, name = (asked or ours or frames)[0]
        inner = "" if frames[0] == (file, line, name) else f", in {frames[0][2]}"
        return f"{name} ({_short(file)}:{line}){inner}"

    def __str__(self) -> str:
        where = f"rank {self.rank} after step {self.sign.step}, {self.sign.phase}"
        if self.is_stopped:
            return f"{where}: its process is stopped (SIGSTOP or a debugger)"
        return f"{where}: {self.operation or 'does not answer'}"


def witnesses(ranks: Sequence[RankProcess]) -> list[Witness]:
    """Ask all ranks where they are."""
    return [Witness(each.rank, each.sign, each.is_stopped(), each.stacks()) for each in ranks]


def suspects(seen: Sequence[Witness]) -> list[Witness]:
    """The ranks that hold up the others, by the first sign that tells some apart; none if all look alike.

    A single rank is held up by others only if it waits for ranks of other hosts.
    """
    steps = min(each.sign.step for each in seen)
    tests = (
        [each for each in seen if each.is_stopped],
        [each for each in seen if not each.stacks],
        [each for each in seen if each.sign.step == steps],
        [each for each in seen if not each.waits_for_others],
    )
    alone = [each for each in seen if len(seen) == 1 and not each.waits_for_others]
    return next((named for named in tests if 0 < len(named) < len(seen)), alone)


def told(seen: Sequence[Witness], seconds: float) -> str:
    """The hang in one line: those at fault first."""
    guilty = suspects(seen)
    others = [each for each in seen if each not in guilty]
    shown = "; ".join(map(str, (guilty + others)[:MOST_TOLD]))
    return f"no answer for {seconds:.4g} s: {shown}"


def _short(file: str) -> str:
    return f"convmesh/{file.rpartition(_OURS)[2]}" if _OURS in file else file
