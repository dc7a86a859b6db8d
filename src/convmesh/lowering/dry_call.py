"""A call of a network before it is run dry: what distinguishes it from others, and the function to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.layout import Layout
from convmesh.layout.channels import ChannelSplit
from convmesh.layout.layout import Cut
from convmesh.lowering.any_extent import uncut
from convmesh.lowering.axis_names import Axes, AxisNames
from convmesh.ops.core.sharded import Sharded

Function = Callable[..., Any]
Ready = tuple[Function, list[torch.Tensor]]
"""A function of a call's arguments, and the weights without data that it uses."""


class DryCall(ABC):
    """A call, apart from its arguments. It is made ready only if no call like it has run before."""

    @property
    @abstractmethod
    def key(self) -> Any:
        """Distinguishes calls that differ in more than their arguments. None means: never reuse the result."""

    @property
    def axes(self) -> Axes:
        """Axes that it may cut by, other than those that cut its arguments."""
        return ()

    @property
    def uses_sub_batches(self) -> bool:
        """Whether its result may depend on the plan's number of sub-batches."""
        return False

    @property
    def is_alike_everywhere(self) -> bool:
        """Whether ranks with equal shard shapes behave identically and exchange no point-to-point messages."""
        return False

    def on_own_samples(self, axes: Axes, args: Any) -> DryCall | None:
        """The call on one rank's samples of a batch that `axes` cut; None if it does not treat samples one by one."""
        del axes, args
        return None

    @property
    def counts_samples(self) -> bool:
        """Whether all that it does and holds is linear in its number of samples."""
        return False

    def with_channels(self, channels: int) -> DryCall | None:
        """The call on that many channels; None if its result is not linear in their number."""
        del channels
        return None

    @property
    def filters(self) -> int:
        """Output channels, if fixed; 0 if the call returns as many channels as it receives."""
        return 0

    @property
    def finds_statistics(self) -> bool:
        """Whether it normalises, and so reads a whole channel at once."""
        return False

    @property
    def joins_channels(self) -> bool:
        """Whether its arguments may differ in their channels; only the first one's are counted."""
        return False

    def with_choice(self, decided: ChannelSplit | None) -> DryCall:
        """The call under a plan that already names the weight cut which this call chose."""
        del decided
        return self

    @abstractmethod
    def renamed(self, names: AxisNames) -> DryCall:
        """The same call on a mesh whose axes have other names."""

    @abstractmethod
    def ready(self) -> Ready:
        """The function to run, with its weights."""


@dataclass(frozen=True)
class PlainCall(DryCall):
    """A function that names no axis and uses no weights."""

    function: Function
    is_known: bool
    """Whether the function alone identifies the call."""

    @property
    def key(self) -> Any:
        return self.function if self.is_known else None

    def renamed(self, names: AxisNames) -> PlainCall:
        del names
        return self

    def ready(self) -> Ready:
        return self.function, []


@dataclass(frozen=True)
class ArrangeCall(DryCall):
    """A change of layout, separate from the layer that asks for it."""

    cuts: tuple[Cut, ...]

    @property
    def key(self) -> Any:
        return "arrange", self.cuts

    @property
    def axes(self) -> Axes:
        return tuple(name for cut in self.cuts for name in cut.axes)

    def with_channels(self, channels: int) -> ArrangeCall | None:
        if len(self.cuts) < 2 or self.cuts[1].axes:
            return None
        return ArrangeCall((self.cuts[0], uncut(channels), *self.cuts[2:]))

    def renamed(self, names: AxisNames) -> ArrangeCall:
        return ArrangeCall(names.cuts(self.cuts))

    def ready(self) -> Ready:
        return self._arranged, []

    def _arranged(self, x: Sharded) -> Sharded:
        return x.redistribute(Layout(x.layout.mesh, self.cuts))
