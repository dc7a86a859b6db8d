"""What a compiled step holds: every value that is written, from the kernel that writes it to the last that reads it."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.plans.fused.flow import LiveMoment
from convmesh.plans.fused.kernels import Kernel


def moments_of(kernels: Sequence[Kernel]) -> tuple[LiveMoment, ...]:
    """One for each kernel, in the order in which they run."""
    last = {number: at for at, kernel in enumerate(kernels) for number in kernel.reads}
    leaving: dict[int, list[int]] = {}
    for number, at in last.items():
        leaving.setdefault(at, []).append(number)
    held: dict[int, int] = {}
    moments, total, gradients = [], 0, 0
    for at, kernel in enumerate(kernels):
        freed = sum(held.pop(number, 0) for number in leaving.get(at, ()))
        made = {number: size for number, size in kernel.writes.items() if number in last}
        where = kernel.members[0]
        stays = sum(kernel.writes.values()) - sum(made.values()) if where.is_backward else 0
        new = sum(made.values()) + stays
        # A pointwise kernel may write to the memory of what it reads for the last time.
        reused = min(freed, new) if kernel.form == "pointwise" and not kernel.is_extern else 0
        moments.append(LiveMoment(where.is_backward, where.node, total + new - reused, gradients + stays))
        held |= made
        gradients += stays
        total += new - freed
    return tuple(moments)
