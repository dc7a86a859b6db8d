"""Where the ranks of a verification run: forked on this machine's CPUs, or on its GPUs, with the precision of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from convmesh.errors import UnsupportedError
from convmesh.testing.ranks import run_ranks
from convmesh.verification.fresh_process import GPU_VARIABLES, in_fresh_process
from convmesh.verification.judge import Bounds

SINGLE = Bounds(tolerance=1e-5, rounding_margin=30.0)
"""In float32 every sum is rounded, as one process in float32 shows, not only the last digit of the inputs."""


@dataclass(frozen=True)
class RankPlace:
    """Ranks on CPUs are forked here and compute in float64.

    Those on GPUs compute in float32, as people train, and are forked by a process of their own: after a backward pass,
    as this one has made, or after CUDA has started, a process cannot fork ranks that use GPUs.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    gpus: int = 0
    variables: Mapping[str, str | None] | None = None
    """Environment variables that make the GPUs visible to that process; None if ranks are forked here."""

    @property
    def is_exact(self) -> bool:
        return self.dtype == torch.float64

    @property
    def bounds(self) -> Bounds:
        return Bounds() if self.is_exact else SINGLE

    def run(self, n: int, fn: Callable[..., Any], *args: Any, seconds_timeout: float) -> list[Any]:
        """What `fn(*args)` returns on each of `n` ranks. NCCL joins ranks with a GPU each, Gloo those that share."""
        if self.variables is None:
            return run_ranks(n, fn, *args, seconds_timeout=seconds_timeout)
        options = {"seconds_timeout": seconds_timeout, "backend": "nccl" if self.gpus >= n else "gloo"}
        results: list[Any] = in_fresh_process(run_ranks, (n, fn, *args), options, seconds_timeout, self.variables)
        return results

    def taken(self) -> torch.device:
        """On a rank: its device. Ranks take GPUs in turn, and compute products in float32, not in TF32."""
        if self.device == "cpu":
            return torch.device("cpu")
        index = dist.get_rank() % torch.cuda.device_count()
        torch.cuda.set_device(index)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return torch.device("cuda", index)


def place_of(device: str) -> RankPlace:
    """The place that a user names."""
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"`device` (={device!r}) must be 'cpu' or 'cuda', which is all GPUs in CUDA_VISIBLE_DEVICES."
        )
    if device == "cpu":
        return RankPlace()
    if not torch.cuda.is_available():
        raise UnsupportedError("`device` (='cuda') needs a GPU, and torch sees none here; use device='cpu'.")
    variables = {name: os.environ.get(name) for name in GPU_VARIABLES}
    return RankPlace("cuda", torch.float32, torch.cuda.device_count(), variables)
