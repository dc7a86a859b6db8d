"""Split operators: torch functions on `Sharded` tensors."""

from convmesh.ops import pointwise as pointwise
from convmesh.ops.registry import implements, supported
from convmesh.ops.sharded import Sharded, from_local, replicated, shard

__all__ = ["Sharded", "from_local", "implements", "replicated", "shard", "supported"]
