"""Which dims a node's transfers cut: the runtime's Python overhead depends on it."""

from __future__ import annotations

from convmesh.layout.mesh import CHANNEL_AXES, SPACE_AXES
from convmesh.plans.steps import Steps, Transfer


def cut_of(steps: Steps) -> str | None:
    """`channels`, else `space`, else `samples`, by the axes of the transfers; None where nothing is sent."""
    sent = [step for step in steps if isinstance(step, Transfer)]
    axes = {axis for transfer in sent for axis in transfer.axes}
    if axes & {*CHANNEL_AXES}:
        return "channels"
    if axes & {*SPACE_AXES}:
        return "space"
    return "samples" if sent else None
