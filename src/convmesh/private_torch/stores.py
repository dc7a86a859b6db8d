"""The store where a job's ranks found each other: the only place to meet before any process group is opened."""

from torch.distributed.distributed_c10d import _get_default_store as default_store

__all__ = ["default_store"]
