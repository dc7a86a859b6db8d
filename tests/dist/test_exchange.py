"""Exchanges between real ranks: values forward, sums of gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from convmesh.dist import OpenMesh, exchange, open_mesh
from convmesh.layout import Demand, ExchangePlan, Layout, Mesh, Region, plan_exchange
from convmesh.layout.exchange_plan import Carrier
from convmesh.layout.maps import DimMap, Same, Window, demand, out_shape
from convmesh.testing import adjoint_error, opened, run_ranks
from convmesh.testing.strategies import layouts
from tests.conftest import Pools
from tests.draws import draws
from tests.layout.test_exchange_plan import dim_maps
from tests.ops.grids import on_grids

HALO = Window(3, low=1, high=1)
PERIODIC = Window(3, low=1, high=1, mode="circular")


@dataclass(frozen=True)
class Case:
    """An operator's input in one layout, its output in another, and how messages travel."""

    source: Layout
    work: Layout
    maps: tuple[DimMap, ...]
    dtype: torch.dtype = torch.float64
    memory_format: torch.memory_format = torch.contiguous_format
    carrier: Carrier | None = None

    @property
    def needs(self) -> Demand:
        return demand(self.work, self.maps, self.source.shape)

    def plan(self, rank: int) -> ExchangePlan:
        plan = plan_exchange(self.source, self.needs, rank)
        forward, adjoint = (self.carrier if c != "none" else None for c in (plan.carrier, plan.adjoint_carrier))
        return replace(plan, carrier=forward or plan.carrier, adjoint_carrier=adjoint or plan.adjoint_carrier)

    def local(self, rank: int) -> torch.Tensor:
        shard = numbered(self.source.shape, self.dtype)[self.source.box(rank).slices()]
        return shard.contiguous(memory_format=self.memory_format)

    def check(self, mesh: OpenMesh | None = None) -> None:
        """The needed values arrive exactly; each owner's gradient is the sum over all pieces of work."""
        mesh = mesh or opened(self.source.mesh)
        plan, local = self.plan(mesh.rank), self.local(mesh.rank).requires_grad_()
        fetched = exchange(local, plan, mesh)
        assert fetched.shape == plan.frame.shape
        values = pick(fetched, plan.needed.within(plan.frame))
        torch.testing.assert_close(values, self.wanted(mesh.rank), rtol=0, atol=0)
        fetched.backward(framed(plan, self.cotangent(mesh.rank)))
        torch.testing.assert_close(local.grad, self.gradient(mesh.rank), rtol=0, atol=0)

    def wanted(self, rank: int) -> torch.Tensor:
        return pick(numbered(self.source.shape, self.dtype), self.needs.region(rank))

    def cotangent(self, rank: int) -> torch.Tensor:
        """Integers, equal on the replicas of a piece of work and small enough to be summed exactly."""
        return (numbered(self.needs.region(rank).shape, self.dtype) + self._work(rank)) % 5

    def gradient(self, rank: int) -> torch.Tensor:
        """The gradient of this rank's box on a single device; replicas of work count once."""
        total = torch.zeros(self.source.shape, dtype=self.dtype)
        for other in {self._work(other): other for other in range(self.source.mesh.size)}.values():
            scatter(total, self.needs.region(other), self.cotangent(other))
        return total[self.source.box(rank).slices()]

    def _work(self, rank: int) -> int:
        place = self.source.mesh.coordinates(rank)
        return self.source.mesh.part(self.work.axes, place)


def numbered(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Integers that every type represents exactly."""
    size = torch.Size(shape)
    return (torch.arange(size.numel()) % 251).to(dtype).view(size)


def rows(region: Region) -> list[torch.Tensor]:
    return [torch.tensor([i for s in spans for i in range(*s)], dtype=torch.long) for spans in region.dims]


def scatter(whole: torch.Tensor, region: Region, values: torch.Tensor) -> None:
    whole.index_put_(torch.meshgrid(*rows(region), indexing="ij"), values, accumulate=True)


def framed(plan: ExchangePlan, values: torch.Tensor) -> torch.Tensor:
    """The needed values, with zeros in the holes that operators skip."""
    frame = torch.zeros(plan.frame.shape, dtype=values.dtype)
    scatter(frame, plan.needed.within(plan.frame), values)
    return frame


def pick(whole: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, row in enumerate(rows(region)):
        whole = whole.index_select(dim, row)
    return whole


@st.composite
def cases(draw: st.DrawFn, mesh: Mesh) -> Case:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple))
    source = draw(layouts(mesh, shape))
    maps = tuple(draw(dim_maps(n)) if draw(st.booleans()) else Same() for n in shape)
    out = out_shape(maps, shape)
    work = source.with_shape(out) if draw(st.booleans()) else draw(layouts(mesh, out))
    formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(shape), [])
    return Case(
        source,
        work,
        maps,
        draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])),
        draw(st.sampled_from([torch.contiguous_format, *formats])),
        draw(st.sampled_from([None, "neighbour", "all_to_all"])),
    )


@on_grids
@draws(25)
@given(data=st.data())
def test_any_exchange_is_exact_in_both_directions(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    pools[mesh.size].run(Case.check, data.draw(cases(mesh)))


def adjoint_of(case: Case) -> float:
    mesh = opened(case.source.mesh)
    generator = torch.Generator().manual_seed(mesh.rank)
    plan = case.plan(mesh.rank)
    x, y = (torch.randn(region.shape, generator=generator, dtype=torch.float64) for region in (plan.held, plan.needed))
    return adjoint_error(lambda local: exchange(local, plan, mesh), x, framed(plan, y), mesh)


@on_grids
@given(data=st.data())
def test_the_adjoint_is_the_transpose(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    """Layouts without replicas, for which the sum over ranks is the inner product."""
    shape = data.draw(st.tuples(*[st.integers(1, 8)] * max(1, len(mesh.axes))))
    source = Layout.of(mesh, shape, dict(enumerate(mesh.axes)))
    maps = tuple(data.draw(dim_maps(n)) for n in shape)
    case = Case(source, source.with_shape(out_shape(maps, shape)), maps)
    assert max(pools[mesh.size].run(adjoint_of, case)) < 1e-14


def halo(mesh: Mesh, shape: tuple[int, ...], window: Window, dims: Sequence[int]) -> Case:
    source = Layout.of(mesh, shape, dict(zip(dims, mesh.axes, strict=True)))
    maps = tuple(window if dim in dims else Same() for dim in range(len(shape)))
    return Case(source, source.with_shape(out_shape(maps, shape)), maps)


CASES = {
    "corners of three cut dims": halo(Mesh(depth=2, height=2, width=2), (1, 2, 5, 4, 3), HALO, (2, 3, 4)),
    "more ranks than rows": halo(Mesh(width=8), (1, 2, 3), HALO, [2]),
    "halo beyond the next neighbour": halo(Mesh(width=8), (1, 1, 10), Window(9, low=4, high=4), [2]),
    "two pieces from one peer": halo(Mesh(width=2), (1, 2, 6), PERIODIC, [2]),
    "periodic in two dims": halo(Mesh(height=2, width=2), (1, 1, 4, 4), PERIODIC, (2, 3)),
    "stride that skips ranks": halo(Mesh(width=4), (1, 1, 9), Window(2, stride=4), [2]),
    "a rank whose output is empty": halo(Mesh(width=3), (1, 1, 5), Window(4), [2]),
}


@pytest.mark.parametrize("carrier", [None, "neighbour", "all_to_all"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_halos(case: Case, carrier: Carrier | None, pools: Pools) -> None:
    pools[case.source.mesh.size].run(Case.check, replace(case, carrier=carrier))


@pytest.mark.parametrize("carrier", [None, "neighbour", "all_to_all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gathers_of_every_type(dtype: torch.dtype, carrier: Carrier | None, pools: Pools) -> None:
    mesh = Mesh(data=2, width=4)
    cut, whole = Layout.of(mesh, (2, 8), {0: "data", 1: "width"}), Layout.of(mesh, (2, 8), {0: "data"})
    gather = Case(cut, whole, (Same(), Same()), dtype, carrier=carrier)
    scatter = Case(whole, cut, (Same(), Same()), dtype, carrier=carrier)
    if carrier is None:
        assert (gather.plan(0).carrier, scatter.plan(0).adjoint_carrier) == ("all_gather", "all_gather")
    for case in (gather, scatter):
        pools[8].run(Case.check, case)


def fetched_format(case: Case) -> bool:
    mesh = opened(case.source.mesh)
    fetched = exchange(case.local(mesh.rank), case.plan(mesh.rank), mesh)
    return fetched.is_contiguous(memory_format=case.memory_format)


def test_a_halo_of_a_channels_last_shard_is_channels_last(pools: Pools) -> None:
    case = replace(halo(Mesh(height=2, width=2), (2, 3, 6, 6), HALO, (2, 3)), memory_format=torch.channels_last)
    assert pools[4].run(fetched_format, case) == [True] * 4


def moves_nothing(case: Case) -> bool:
    mesh = opened(case.source.mesh)
    local = case.local(mesh.rank)
    return exchange(local, case.plan(mesh.rank), mesh) is local


def test_values_already_in_place_are_not_copied(pools: Pools) -> None:
    assert pools[4].run(moves_nothing, halo(Mesh(height=2, width=2), (1, 1, 4, 4), Window(1), (2, 3))) == [True] * 4


def gradient_of_a_sum(case: Case) -> torch.Tensor:
    """`sum().backward()` passes on a single expanded number as gradient."""
    mesh = opened(case.source.mesh)
    local = case.local(mesh.rank).requires_grad_()
    exchange(local, case.plan(mesh.rank), mesh).sum().backward()
    assert local.grad is not None
    return local.grad


def test_expanded_gradients(pools: Pools) -> None:
    gradients = pools[3].run(gradient_of_a_sum, halo(Mesh(width=3), (7,), HALO, [0]))
    assert torch.cat(gradients).tolist() == [1, 1, 2, 2, 2, 2, 1]


LINE = halo(Mesh(width=2), (1, 2, 5), PERIODIC, [2])
SQUARE = halo(Mesh(height=2, width=2), (1, 1, 5, 3), PERIODIC, (2, 3))


def test_a_mesh_over_some_ranks_of_the_job_counts_its_own() -> None:
    def check() -> int | None:
        if dist.get_rank() < 2:
            return None
        mesh = open_mesh(Mesh(width=2), ranks=[2, 3])
        for carrier in ("neighbour", "all_to_all"):
            replace(LINE, carrier=carrier).check(mesh)
        return mesh.rank

    assert run_ranks(4, check) == [None, None, 0, 1]


def test_two_meshes_side_by_side_and_one_over_both() -> None:
    def check() -> None:
        mine = open_mesh(Mesh(width=2), ranks=[0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
        everyone = open_mesh(Mesh(height=2, width=2))
        for _ in range(3):
            LINE.check(mine)
            SQUARE.check(everyone)

    run_ranks(4, check)


def test_a_mesh_of_one_rank_in_a_larger_job() -> None:
    def check() -> None:
        alone = open_mesh(Mesh(), ranks=[dist.get_rank()])
        halo(Mesh(), (1, 1, 5), PERIODIC, []).check(alone)

    run_ranks(2, check)


@pytest.mark.parametrize("carrier", [None, "neighbour", "all_to_all"])
def test_ranks_in_any_order(carrier: Carrier | None) -> None:
    order = [3, 1, 0, 2]
    line = Mesh(width=4)
    gather = Case(Layout.of(line, (8,), {0: "width"}), Layout.of(line, (8,)), (Same(),), carrier=carrier)

    def check() -> tuple[int, list[int]]:
        replace(SQUARE, carrier=carrier).check(open_mesh(SQUARE.source.mesh, ranks=order))
        mesh = open_mesh(line, ranks=order)
        gather.check(mesh)
        return mesh.rank, mesh.members(["width"])

    assert run_ranks(4, check) == [(order.index(rank), [2, 1, 3, 0]) for rank in range(4)]
