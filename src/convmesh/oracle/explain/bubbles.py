"""When the stages of a pipeline work and when they wait, as a diagram of equal time slots."""

from __future__ import annotations

from convmesh.oracle.simulate.pipeline_clocks import StageSeconds, run_actions
from convmesh.plans.stage_order import actions_of

MOST = 6
"""Most micro-batches and stages in a diagram."""


def slots(stages: int, microbatches: int) -> list[list[str]]:
    """By stage: its work in each slot of the 1F1B schedule, forward `1`, backward `1'`, or nothing."""
    orders = {stage: actions_of("1f1b", stages, stages, microbatches, stage) for stage in range(stages)}
    ran = run_actions(orders, [StageSeconds(forward=1.0, backward=1.0)] * stages)
    rows = [[""] * round(max(one.end for run in ran.values() for one in run)) for _ in range(stages)]
    for stage, run in ran.items():
        for one in run:
            prime = "'" if one.action.kind == "backward" else ""
            rows[stage][round(one.begin)] = f"{one.action.microbatch + 1}{prime}"
    return rows


def diagram(stages: int, microbatches: int, letters: str) -> list[str]:
    """The slots of the first few stages and micro-batches, and the idle share of the whole step."""
    shown, few = min(stages, MOST), min(microbatches, MOST)
    rows = slots(shown, few)
    lines = [
        f"{letters[stage]} |" + "|".join(name.ljust(2) if name else " ." for name in row) + "|"
        for stage, row in enumerate(rows)
    ]
    lost = (stages - 1) / (microbatches + stages - 1)
    note = "time goes to the right; 2 is micro-batch 2 forward, 2' backward, . is waiting"
    if (shown, few) != (stages, microbatches):
        note += f" ({shown} stages and {few} micro-batches are shown)"
    formula = (
        f"idle: (S−1)/(m+S−1) = {lost:.0%} of the step with S = {stages} stages and m = {microbatches} micro-batches"
    )
    return [*lines, note, formula]
