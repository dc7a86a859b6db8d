"""The end of a pipeline: the last stage's packed outputs become a micro-batch's part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.lowering.parcels import Parcel
from convmesh.ops.core.sharded import Sharded
from convmesh.runtime.direct_engine import whole_loss
from convmesh.runtime.layer_following import HasLoss


class StageLoss:
    """The parts of a batch's loss. Its targets and shares are those of the step under way."""

    def __init__(
        self, owner: HasLoss, outputs: Parcel, returned: Callable[[Sequence[Sharded]], Any], mesh: OpenMesh
    ) -> None:
        """`returned` gives values the structure of the network's outputs."""
        self._owner, self._outputs, self._returned, self._mesh = owner, outputs, returned, mesh
        self.targets: list[Any] = []
        self.shares: list[float] = []
        """The weight of each micro-batch's loss in the batch's."""

    def __call__(self, packed: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """One micro-batch's part of the loss."""
        if not self.shares[index]:  # all its targets are ignored, and the mean over none is NaN
            values = self._outputs.unpack(packed, self._mesh)
            return torch.stack([value.local.sum() for value in values]).sum() * 0
        return self.weighted(self.whole(packed, self.targets[index]), index)

    def whole(self, packed: Sequence[torch.Tensor], target: Any) -> torch.Tensor:
        """The loss of a micro-batch as if it were a batch."""
        values = self._outputs.unpack(packed, self._mesh)
        return whole_loss(self._owner.loss(self._returned(values), target))

    def weighted(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        return loss * self.shares[index]
