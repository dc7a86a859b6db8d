"""Values between stages, and their gradients, arrive unchanged in any memory format."""

import itertools
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh
from convmesh.dist import dry_mesh
from convmesh.layout import Layout
from convmesh.lowering.parcels import Parcel
from convmesh.ops.core.sharded import Sharded

PLAIN = (0, 1, 2, 3)
ORDERS = list(itertools.permutations(PLAIN))
DTYPES = [torch.float32, torch.float64, torch.int64]
Order = tuple[int, ...]
Drawn = tuple[tuple[int, ...], Order, Order, torch.dtype]

values = st.tuples(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.sampled_from([(), *ORDERS]),
    st.sampled_from(ORDERS),
    st.sampled_from(DTYPES),
)
"""A shape, the order that was planned and the one that was found, a type."""


@given(st.lists(values, min_size=1, max_size=4))
def test_packed_values_are_unpacked_and_gradients_return(drawn: list[Drawn]) -> None:
    mesh = replace(dry_mesh(Mesh(data=1), 0), device=torch.device("cpu"))
    layouts = tuple(Layout.of(mesh.mesh, shape) for shape, *_ in drawn)
    planned = tuple(order for _, order, _, _ in drawn)
    parcel = Parcel(tuple(map(str, range(len(drawn)))), layouts, tuple(dtype for *_, dtype in drawn), planned)
    sent = [_value(shape, found, dtype) for shape, _, found, dtype in drawn]
    shards = [Sharded(value, layout, mesh) for value, layout in zip(sent, layouts, strict=True)]
    arrived = [shard.local for shard in parcel.unpack(parcel.pack(shards, mesh.device), mesh)]
    for value, there, order in zip(sent, arrived, planned, strict=True):
        assert torch.equal(there, value)
        assert there.permute(order or PLAIN).is_contiguous()
    squares = [there.double().square().sum() for there in arrived if there.requires_grad]
    if squares:
        torch.stack(squares).sum().backward()
    for value in sent:
        assert value.grad is None or torch.equal(value.grad, 2 * value.detach())
        assert (value.grad is not None) == value.requires_grad


def _value(shape: tuple[int, ...], order: Order, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_permuted(shape, order, dtype=dtype)
    made.copy_(torch.arange(made.numel()).view(shape))
    return made.requires_grad_(dtype.is_floating_point)
