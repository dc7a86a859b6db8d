"""Split operators: torch functions on `Sharded` tensors."""

from convmesh.ops import adaptive_pool as adaptive_pool
from convmesh.ops import avg_pool as avg_pool
from convmesh.ops import batch_norm as batch_norm
from convmesh.ops import conv_transpose as conv_transpose
from convmesh.ops import dense as dense
from convmesh.ops import dims as dims
from convmesh.ops import extremes as extremes
from convmesh.ops import group_norm as group_norm
from convmesh.ops import index as index
from convmesh.ops import join as join
from convmesh.ops import layer_norm as layer_norm
from convmesh.ops import loss as loss
from convmesh.ops import loss_classes as loss_classes
from convmesh.ops import pad as pad
from convmesh.ops import pointwise as pointwise
from convmesh.ops import pool as pool
from convmesh.ops import reduce as reduce
from convmesh.ops import reshape as reshape
from convmesh.ops import resize as resize
from convmesh.ops import shuffle as shuffle
from convmesh.ops import softmax as softmax
from convmesh.ops import unpool as unpool
from convmesh.ops.conv import conv
from convmesh.ops.dice import dice_loss
from convmesh.ops.dropout import manual_seed
from convmesh.ops.registry import implements, supported
from convmesh.ops.sharded import Sharded, from_local, replicated, shard

__all__ = [
    "Sharded",
    "conv",
    "dice_loss",
    "from_local",
    "implements",
    "manual_seed",
    "replicated",
    "shard",
    "supported",
]
