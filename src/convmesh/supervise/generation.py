"""The ranks of a generation on this host: started together, watched, ended together."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from convmesh.supervise.hang import suspects, told, witnesses
from convmesh.supervise.outcome import Ending, Outcome, judged
from convmesh.supervise.pulse import Phase
from convmesh.supervise.rank_process import RankProcess
from convmesh.supervise.world import World

SECONDS_GRACE = 10.0
"""How long ranks may take to end by themselves after one has failed, so that they hear why."""

_SECONDS_LOOK, _LOOKS = 0.25, 5
"""How often to check pulses: a few times a second, and several times within a time-out."""


class Generation:
    """Started by its constructor; `close` ends it."""

    def __init__(self, world: World, command: Sequence[str], seconds_timeout: float) -> None:
        self.world, self._seconds = world, seconds_timeout
        self.stopped_by = 0
        """The signal that it was told to stop with, or 0."""
        self.ranks: list[RankProcess] = []
        try:
            for index in range(len(world.slots)):
                self.ranks.append(RankProcess(world, index, command))
        except BaseException:
            self.close()
            raise

    @property
    def step(self) -> int:
        """The last step that any rank here has done."""
        return max(each.sign.step for each in self.ranks)

    @property
    def step_of_all(self) -> int:
        """The last step that all ranks here have done."""
        return min(each.sign.step for each in self.ranks)

    @property
    def began(self) -> int:
        """The step from which it trains; -1 if it has not got that far."""
        return min(each.sign.began for each in self.ranks)

    @property
    def owns_folder(self) -> bool:
        return min(each.sign.phase for each in self.ranks) >= Phase.SETTING_UP

    def slot_of(self, rank: int) -> int:
        return self.world.slots[rank - self.world.first]

    def ask_for_room(self) -> None:
        """Have the ranks stop at the next checkpoint."""
        for each in self.ranks:
            each.ask_for_room()

    def stop(self, number: int) -> None:
        """Pass a signal on: ranks that train save and end. Others have nothing to save and are killed."""
        self.stopped_by = number
        trains = all(each.sign.phase >= Phase.TRAINING for each in self.ranks)
        for each in self.ranks:
            each.send(number if trains else signal.SIGKILL)

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> Outcome:
        """Wait until all have ended, or must: one was killed, all are silent, or `is_over`, which is polled."""
        deadline = None
        while running := [each for each in self.ranks if each.code is None]:
            wait([each.handle for each in running], self._pause())
            for each in running:
                each.shorten_log()
            codes = self._codes()
            if any(code < 0 for code in codes.values()) or is_over():
                break  # those left have nothing to say
            if any(codes.values()):
                deadline = deadline or time.monotonic() + SECONDS_GRACE
            if deadline and time.monotonic() > deadline:
                break
            if not any(codes.values()) and (overdue := self._overdue(running)):
                return self.hang(max(each.sign.seconds for each in overdue))
        self._show_failures()
        return judged(self._codes())

    def hang(self, seconds: float = 0.0) -> Outcome:
        """Ask those that run where they are: they hang, or ranks of another host do that wait for them.

        `seconds` is how long they might be silent, if that is more than the time-out.
        """
        seen = witnesses([each for each in self.ranks if each.code is None])
        guilty = tuple(each.rank for each in suspects(seen))
        return Outcome(Ending.HUNG, 1, guilty, told(seen, max(seconds, self._seconds)))

    def _pause(self) -> float:
        return min(_SECONDS_LOOK, self._seconds / _LOOKS)

    def _codes(self) -> dict[int, int]:
        codes = {each.rank: each.code for each in self.ranks}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _overdue(self, running: Sequence[RankProcess]) -> list[RankProcess]:
        return [each for each in running if each.seconds_overdue(self._seconds) > 0]

    def _show_failures(self) -> None:
        """Show what the first failed rank wrote; rank 0 writes to the terminal itself."""
        failed = [each for each in self.ranks if each.code not in (None, 0)]
        if failed and all(each.rank for each in failed):
            sys.stderr.write(failed[0].last_words())

    def close(self) -> None:
        """End all."""
        for each in self.ranks:
            each.close()
