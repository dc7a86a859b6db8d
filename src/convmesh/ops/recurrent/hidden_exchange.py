"""How ranks that each have some hidden units share hidden states between time steps.

Every step needs the whole previous state, for every unit's gates look at all of it. Either each rank shows its units to
all others (the adjoint adds their gradients where the units are), or, where units are projected to fewer features, each
rank has a partial sum of all features, and all get the sum. The alternative, sending the gates' sums, would move more
by a factor of the number of gates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch

from convmesh.dist import OpenMesh, all_reduce
from convmesh.dist.exchange import Pieces, accumulate, fetch, start
from convmesh.layout import Cut, Demand, ExchangePlan, Layout, Mesh, Span, plan_exchange
from convmesh.layout.demand import DimDemand
from convmesh.layout.layout import LAYOUTS_KEPT, chunked_cut
from convmesh.ops.core.exchange_plans import conversion

Axes = tuple[str, ...]


@dataclass(frozen=True)
class HiddenExchange(ABC):
    """Between what a rank's units make and the state that all ranks see; the last dim is units or features."""

    mesh: OpenMesh
    axes: Axes
    """The axes that cut the units."""

    @abstractmethod
    def show(self, own: torch.Tensor) -> torch.Tensor:
        """The whole state."""

    @abstractmethod
    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank's units made of a state that all ranks have, or of its gradient."""

    @abstractmethod
    def summed_part(self, partial: torch.Tensor) -> torch.Tensor:
        """The same for the sum of all ranks' partial gradients: the adjoint of `show`."""

    @abstractmethod
    def with_part(self, partial: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """A partial gradient of the whole state, plus what only this rank has for its own units."""


@dataclass(frozen=True)
class ShownUnits(HiddenExchange):
    """Units are cut; tensors are (…, samples, units)."""

    samples: Cut
    units: int

    def show(self, own: torch.Tensor) -> torch.Tensor:
        source = self._layout(own)
        return fetch(self.mesh, conversion(source, source.with_whole([own.dim() - 1]), self.mesh.rank), own)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        span = self._layout(whole).box(self.mesh.rank).spans[-1]
        return whole[..., span.slice()]

    def summed_part(self, partial: torch.Tensor) -> torch.Tensor:
        plan = _summing(self._layout(partial), self.axes, self.mesh.rank)
        payload = Pieces([(plan.frame, partial)], partial)
        sent = start(self.mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, payload)
        return accumulate(self.mesh, plan, partial, sent.wait())

    def with_part(self, partial: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        if own is not None:
            self.part(partial).add_(own)
        return partial

    def _layout(self, tensor: torch.Tensor) -> Layout:
        return _unit_layout(self.mesh.mesh, tuple(tensor.shape[:-2]), self.samples, self.units, self.axes)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _unit_layout(mesh: Mesh, leading: tuple[int, ...], samples: Cut, units: int, axes: Axes) -> Layout:
    whole, last = Layout.of(mesh, (*leading, samples.partition.extent, units)), len(leading) + 1
    return whole.replacing({last - 1: samples, last: chunked_cut(mesh, units, axes)})


@lru_cache(maxsize=LAYOUTS_KEPT)
def _summing(source: Layout, axes: Axes, rank: int) -> ExchangePlan:
    return plan_exchange(source, every_rank_apart(source, axes), rank)


def every_rank_apart(source: Layout, axes: Axes) -> Demand:
    """Every rank along `axes` needs all of the last dim, for separate work: the adjoint adds what each found."""
    whole = Span(0, source.shape[-1])
    last = DimDemand(axes, [(whole,)] * source.mesh.extent(axes))
    return Demand(source.mesh, (*Demand.ownership(source).dims[:-1], last))


@dataclass(frozen=True)
class SummedFeatures(HiddenExchange):
    """Units are cut and projected: every rank has a partial sum of all features."""

    def show(self, own: torch.Tensor) -> torch.Tensor:
        return all_reduce(own, self.mesh, self.axes)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def summed_part(self, partial: torch.Tensor) -> torch.Tensor:
        return all_reduce(partial, self.mesh, self.axes)

    def with_part(self, partial: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        assert own is None, "only LSTM has projections, and it has no way around its gates"
        return partial
