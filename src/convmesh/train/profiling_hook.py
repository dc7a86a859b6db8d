"""Profiles a few steps of a run, after its first ones, and leaves what it measured in the run folder."""

from __future__ import annotations

from pathlib import Path

from convmesh.oracle import Prediction
from convmesh.profiling.rank_profile import save_profile
from convmesh.profiling.saved_prediction import forget_prediction, save_prediction
from convmesh.profiling.session import ProfileSession
from convmesh.train.step_record import WARM_UP, StepRecord

STEPS = 5
"""Steps that `--profile` times."""


class StepProfiles:
    """A hook, on every rank. Short runs skip the warm-up."""

    def __init__(self, session: ProfileSession, steps: int, run: Path, first: int, last: int) -> None:
        self._session, self._run = session, run
        self._begin = min(first + WARM_UP, max(first, last - steps))
        self._end = min(self._begin + steps, last)
        self._is_on = False
        if self._begin == first < self._end:
            self._start()

    def after_step(self, record: StepRecord) -> None:
        if self._is_on:
            begin = record.ended - record.seconds_step
            self._session.end_step(record.step, begin, record.ended, record.seconds_data)
        if record.step == self._begin:
            self._start()
        elif record.step == self._end:
            self.close()

    def close(self) -> None:
        """Write what there is; a run that is stopped early has fewer steps."""
        if self._is_on:
            self._is_on = False
            self._session.detach()
            save_profile(self._session.profile, self._run)

    def _start(self) -> None:
        self._session.attach()
        self._is_on = True


def keep_prediction(prediction: Prediction | None, run: Path) -> None:
    """On the first rank: keep the predicted timeline next to the profile, and none of an earlier one."""
    if prediction is not None:
        save_prediction(prediction, run)
    else:
        forget_prediction(run)
