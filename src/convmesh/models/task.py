"""The training task of a reference network: the shape of its targets, random targets, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["class", "class per voxel", "class per word", "values", "frames"]

LOSSES: dict[Kind, str] = {
    "class": "cross_entropy",
    "class per voxel": "cross_entropy",
    "class per word": "cross_entropy",
    "values": "mse_loss",
    "frames": "binary_cross_entropy_with_logits",
}


@dataclass(frozen=True, slots=True)
class Task:
    """`count` classes, values or frames. A target per voxel is `coarser` times as coarse as the sample."""

    kind: Kind
    count: int
    coarser: int = 1

    @property
    def loss_name(self) -> str:
        """The name of the loss in `torch.nn.functional`."""
        return LOSSES[self.kind]

    def loss(self) -> Callable[..., Any]:
        import torch.nn.functional as F

        function: Callable[..., Any] = getattr(F, self.loss_name)
        return function

    def target_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The target's shape for a batch of `shape`."""
        per_sample: dict[Kind, tuple[int, ...]] = {
            "class": (),
            "class per voxel": tuple(extent // self.coarser for extent in shape[2:]),
            "class per word": tuple(shape[1:]),
            "values": (self.count,),
            "frames": (self.count, *shape[2:]),
        }
        return (shape[0], *per_sample[self.kind])

    def draw_target(self, shape: Sequence[int], generator: torch.Generator | None = None) -> torch.Tensor:
        """A random target for a batch of `shape`: class indices, or values within ±1 (0 to 1 in frames) as float64."""
        import torch

        target_shape = self.target_shape(shape)
        if self.kind == "frames":
            return torch.rand(target_shape, generator=generator, dtype=torch.float64)
        if self.kind == "values":
            return 2 * torch.rand(target_shape, generator=generator, dtype=torch.float64) - 1
        return torch.randint(0, self.count, target_shape, generator=generator)
