"""One optimiser step: parts of a batch, autocast, gradient scaling, clipping, and the learning rate of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.gradients import GradScaler
from convmesh.runtime import ParallelNet
from convmesh.train.evaluation import Shards
from convmesh.train.field_spellings import precision_of

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SEEDS_RUN = 1 << 32
"""Steps between the dropout seeds of two runs with neighbouring seeds."""


class Stepper:
    """Makes steps of a network; `factor(step)` scales the learning rate. Only the scaler has state."""

    def __init__(
        self,
        net: ParallelNet,
        optimizer: Optimizer,
        *,
        factor: Callable[[int], float] | None = None,
        precision: str = "fp32",
        clip_norm: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.net, self.optimizer = net, optimizer
        self._factor, self._clip_norm, self._seed = factor, clip_norm, seed
        self._dtype = AUTOCAST.get(precision_of(precision))
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.scaler = GradScaler(net.mesh.device.type, mesh=net.mesh) if self._dtype is torch.float16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which layers compute."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.net.mesh.device.type, dtype=self._dtype)

    def rate(self, step: int) -> float:
        """A step's learning rate, of the first group."""
        return self._rates[0] * (self._factor(step) if self._factor else 1.0)

    def __call__(self, step: int, parts: Sequence[Shards]) -> torch.Tensor:
        """Step `step`, counted from 0, on the parts of one batch; the loss of the whole batch."""
        factor = self._factor(step) if self._factor else 1.0
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        # Masks of dropout are a function of seed, step and global index: nothing to restore when a run resumes.
        self.net.manual_seed((self._seed + 1) * _SEEDS_RUN + step)
        losses = [self._backward(part, len(parts), last=part is parts[-1]) for part in parts]
        self._update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, part: Shards, count: int, last: bool) -> torch.Tensor:
        with nullcontext() if last else self.net.no_sync():
            with self.autocast():
                loss: torch.Tensor = self.net(*part)
            share = loss if count == 1 else loss / count
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        return share.detach()

    def _update(self) -> None:
        if self.scaler is not None and self._clip_norm:
            self.scaler.unscale_(self.optimizer)
        if self._clip_norm:
            self.net.clip_grad_norm_(self._clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
