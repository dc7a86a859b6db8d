"""When to give up on a run."""

from __future__ import annotations

from convmesh.supervise.outcome import UNWRITABLE, Ending, Outcome
from convmesh.supervise.policy import Policy

_CRASHED = 1
"""The status of a rank that a program error ended."""


class Patience:
    """Counts consecutive restarts that gained nothing: a run that keeps reaching new checkpoints may go on for ever."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._restarts, self._began = 0, -1

    def lost(self, outcome: Outcome, step: int, began: int) -> str:
        """Why not to try again after ranks that trained from step `began` to `step` were lost; empty to try again."""
        if not self._policy.is_elastic:
            return "not restarted (--no-elastic)"
        if outcome.ending is Ending.LOST and outcome.status == _CRASHED and step == max(began, 0):
            return "not restarted, since it would fail again before its first step"
        if outcome.status == UNWRITABLE and max(began, self._began) < 0:
            return "not restarted, since nothing was ever written"
        self._restarts = 1 if began > self._began else self._restarts + 1
        self._began = max(self._began, began)
        if self._restarts > self._policy.max_restarts:
            return f"gave up: --max-restarts (={self._policy.max_restarts}) restarts in a row saved no new checkpoint"
        return ""
