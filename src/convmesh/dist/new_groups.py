"""Opens process groups over some of a job's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed as dist

from convmesh.private_torch.gloo_groups import gloo_group_like

SHARED_GLOO = "gloo_on_one_loop"


def new_group(ranks: Sequence[int], timeout: timedelta | None, on_host: bool = False) -> dist.ProcessGroup:
    """A group over `ranks`, opened by them alone; `on_host` sends from the host's memory."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout, _backend(on_host), use_local_synchronization=True)
    return group


def _backend(on_host: bool) -> str | None:
    """Gloo groups share the event loop of the job's group, if that has one."""
    if dist.get_backend() == "gloo":
        return _shared_gloo()
    return "gloo" if on_host else None


@cache
def _shared_gloo() -> str:
    dist.Backend.register_backend(SHARED_GLOO, _open_gloo, extended_api=True, devices=["cpu", "cuda"])
    return SHARED_GLOO


def _open_gloo(options: Any, _: Any) -> Any:
    world = dist.group.WORLD
    assert world is not None
    return gloo_group_like(world, options.store, options.group_rank, options.group_size, options.timeout)
