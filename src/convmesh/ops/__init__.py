"""Split operators: torch functions on `Sharded` tensors.

Importing a module of a family registers its operators.
"""

from convmesh.ops.channels import dense as dense
from convmesh.ops.channels import tables as tables
from convmesh.ops.convolution import conv_transpose as conv_transpose
from convmesh.ops.convolution.conv import conv
from convmesh.ops.core.registry import implements, supported
from convmesh.ops.core.sharded import Sharded, from_local, replicated, shard
from convmesh.ops.elementwise import casts as casts
from convmesh.ops.elementwise import fresh as fresh
from convmesh.ops.elementwise import noise as noise
from convmesh.ops.elementwise import overwriting as overwriting
from convmesh.ops.elementwise import pointwise as pointwise
from convmesh.ops.elementwise.dropout import manual_seed
from convmesh.ops.loss import class_losses as class_losses
from convmesh.ops.loss import value_losses as value_losses
from convmesh.ops.loss.dice import dice_loss
from convmesh.ops.norm import batch_norm as batch_norm
from convmesh.ops.norm import group_norm as group_norm
from convmesh.ops.norm import layer_norm as layer_norm
from convmesh.ops.pool import adaptive_pool as adaptive_pool
from convmesh.ops.pool import avg_pool as avg_pool
from convmesh.ops.pool import max_pool as max_pool
from convmesh.ops.pool import unpool as unpool
from convmesh.ops.product import attention as attention
from convmesh.ops.product import heads as heads
from convmesh.ops.product import products as products
from convmesh.ops.recurrent import sequences as sequences
from convmesh.ops.reduce import counting as counting
from convmesh.ops.reduce import extremes as extremes
from convmesh.ops.reduce import reductions as reductions
from convmesh.ops.reduce import softmax as softmax
from convmesh.ops.shape import along as along
from convmesh.ops.shape import dims as dims
from convmesh.ops.shape import index as index
from convmesh.ops.shape import interpolate as interpolate
from convmesh.ops.shape import join as join
from convmesh.ops.shape import pad as pad
from convmesh.ops.shape import repeat as repeat
from convmesh.ops.shape import reshape as reshape
from convmesh.ops.shape import shuffle as shuffle
from convmesh.ops.spectral import complex_numbers as complex_numbers
from convmesh.ops.spectral import fourier as fourier

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
