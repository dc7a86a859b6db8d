"""When the stages of a pipeline work and when they wait, as a diagram of equal time slots."""

from __future__ import annotations

MOST = 6
"""Micro-batches, and stages, that a diagram shows."""


def slots(stages: int, microbatches: int) -> list[list[str]]:
    """By stage: what it does in each slot of the 1F1B schedule, forward `1`, backward `1'`, or nothing."""
    queues = [_order(stage, stages, microbatches) for stage in range(stages)]
    done: dict[tuple[int, str], int] = {}
    rows: list[list[str]] = [[] for _ in range(stages)]
    for time in range(4 * (stages + microbatches)):
        ready = [
            queue[0] if queue and _can(done, stage, queue[0], stages, time) else ""
            for stage, queue in enumerate(queues)
        ]
        for stage, name in enumerate(ready):
            rows[stage].append(name)
            if name:
                done[stage, queues[stage].pop(0)] = time
        if not any(queues):
            break
    return rows


def _order(stage: int, stages: int, microbatches: int) -> list[str]:
    """What a stage does one after the other: some forwards, then one backward for each further forward."""
    ahead = min(microbatches, stages - stage)
    order = [f"{number + 1}" for number in range(ahead)]
    for number in range(microbatches):
        order.append(f"{number + 1}'")
        if ahead + number < microbatches:
            order.append(f"{ahead + number + 1}")
    return order


def _can(done: dict[tuple[int, str], int], stage: int, name: str, stages: int, time: int) -> bool:
    """Forward waits for the stage before, backward for the stage after."""
    backward = name.endswith("'")
    if backward and stage == stages - 1:
        return done.get((stage, name[:-1]), time) < time
    other = stage + 1 if backward else stage - 1
    return other < 0 or done.get((other, name), time) < time


def diagram(stages: int, microbatches: int, letters: str) -> list[str]:
    """The slots of the first few stages and micro-batches, and what is lost in all."""
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
