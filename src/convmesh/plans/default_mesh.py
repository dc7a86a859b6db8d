"""The default mesh for a strategy and a number of ranks."""

from __future__ import annotations

from convmesh.errors import MeshError, PlanError
from convmesh.layout.mesh import Mesh, space_axes
from convmesh.plans.presets import AXES_OF, STRATEGIES


def mesh_for(strategy: str, ranks: int, spatial_dims: int) -> Mesh:
    """Give each prime factor of `ranks`, largest first, to the strategy's axis that has the fewest ranks so far.

    If a strategy has two parts, the second gets the first factor: `data+spatial` on 2 ranks cuts space.
    """
    if ranks < 1:
        raise MeshError(f"`ranks` (={ranks}) must be a positive number of processes.")
    axes = dict.fromkeys(_axes(strategy, spatial_dims), 1)
    for factor in _primes(ranks):
        shortest = min(axes, key=lambda name: axes[name])
        axes[shortest] *= factor
    return Mesh(**axes)


def _axes(strategy: str, spatial_dims: int) -> list[str]:
    """The strategy's axes in the order in which they get factors."""
    if strategy not in STRATEGIES:
        raise PlanError(f"`strategy` (={strategy!r}) must be one of {', '.join(STRATEGIES)}.")
    space = space_axes(spatial_dims)
    parts = [space if part == "spatial" else AXES_OF[part] for part in strategy.split("+")]
    first, *others = parts[::-1]
    axes = [*first[:1], *(name for part in others for name in part), *first[1:]]
    if not axes:
        raise PlanError(
            f"`strategy` (={strategy!r}) cuts space, but the input has no spatial dims; use data or filter."
        )
    return axes


def _primes(number: int) -> list[int]:
    """Prime factors, largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
