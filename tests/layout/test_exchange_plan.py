"""Exchange plans of whole meshes: what every rank would send, receive and add, counted index by index."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.layout import (
    Demand,
    ExchangePlan,
    Layout,
    Mesh,
    Region,
    Route,
    Span,
    exchange_plan,
    plan_conversion,
    plan_exchange,
)
from convmesh.layout.maps import DimMap, Padded, Placed, Same, Strided, Transposed, Whole, Window, demand, out_shape
from convmesh.testing.strategies import layouts, meshes
from tests.layout.test_box import indices

Exchange = tuple[Layout, Demand]


def dim_maps(extent: int) -> st.SearchStrategy[DimMap]:
    """Operators on a dim of `extent` with some output."""
    number, mode = st.integers(1, 3), st.sampled_from(["zeros", "circular", "replicate"])
    pad = st.integers(0, min(2, extent))
    maps: list[st.SearchStrategy[DimMap]] = [
        st.just(Same()),
        st.builds(Whole, number),
        st.builds(Window, number, number, number, pad, pad, mode),
        st.builds(Transposed, number, number, number, st.integers(0, 1)),
        st.builds(Padded, pad, pad, mode),
        st.builds(Placed, number, st.integers(extent + 3, extent + 6)),
        st.just(Strided(extent - 1, -1, extent)),
    ]
    return st.one_of(maps).filter(lambda dim_map: dim_map.out_extent(extent) > 0)


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Changes of layout and inputs of operators, between any two layouts of random tensors on random meshes."""
    mesh = draw(meshes())
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    source = draw(layouts(mesh, shape))
    maps: tuple[DimMap, ...] = tuple(draw(dim_maps(n)) if draw(st.booleans()) else Same() for n in shape)
    out = out_shape(maps, shape)
    work = source.with_shape(out) if draw(st.booleans()) else draw(layouts(mesh, out))
    return source, demand(work, maps, shape)


def plans_of(exchange: Exchange) -> list[ExchangePlan]:
    source, needs = exchange
    return [plan_exchange(source, needs, rank) for rank in range(source.mesh.size)]


def routes(plans: list[ExchangePlan]) -> list[list[Route]]:
    return [[plan.forward for plan in plans], [plan.adjoint for plan in plans]]


def count(*regions: Region | None) -> Counter[tuple[int, ...]]:
    return Counter(index for region in regions if region for index in indices(region))


@settings(max_examples=100)
@given(exchanges())
def test_every_needed_index_arrives_exactly_once(exchange: Exchange) -> None:
    for plan in plans_of(exchange):
        arrived = count(plan.forward.kept, *(message.region for message in plan.forward.receives))
        assert arrived == count(plan.needed)


@settings(max_examples=100)
@given(exchanges())
def test_nothing_is_sent_that_the_receiver_holds_and_only_what_the_sender_holds(exchange: Exchange) -> None:
    plans = plans_of(exchange)
    for plan in plans:
        for message in plan.forward.sends:
            sent = set(indices(message.region))
            assert sent
            assert sent <= set(indices(plan.held))
            assert not sent & set(indices(plans[message.peer].held))


@settings(max_examples=100)
@given(exchanges())
def test_sends_and_receives_match_pairwise(exchange: Exchange) -> None:
    for direction in routes(plans_of(exchange)):
        sent = Counter((rank, m.peer, m.region) for rank, route in enumerate(direction) for m in route.sends)
        received = Counter((m.peer, rank, m.region) for rank, route in enumerate(direction) for m in route.receives)
        assert sent == received
        assert all(sender != receiver for sender, receiver, _ in sent)
        assert len({(sender, receiver) for sender, receiver, _ in sent}) == sent.total()


@settings(max_examples=100)
@given(exchanges())
def test_the_adjoint_is_the_transpose_of_the_logical_operator(exchange: Exchange) -> None:
    """Each owner receives an index once per piece of work that needs it; replicas of work count once."""
    source, needs = exchange
    plans = plans_of(exchange)

    def work_of(rank: int) -> tuple[int, ...]:
        return tuple(place for name, place in source.mesh.coordinates(rank).items() if name in needs.axes)

    wanted = {work_of(rank): plan.needed for rank, plan in enumerate(plans)}
    expected = count(*wanted.values())
    for rank, plan in enumerate(plans):
        messages = [(message.peer, message.region) for message in plan.adjoint.receives]
        if plan.adjoint.kept:
            messages.append((rank, plan.adjoint.kept))
        held = set(indices(plan.held))
        heard = count(*(region for _, region in messages))
        assert heard == Counter({index: times for index, times in expected.items() if index in held})
        works = [work_of(peer) for peer, _ in messages]
        assert len(set(works)) == len(works)
        assert all(set(indices(region)) <= set(indices(plans[peer].needed)) for peer, region in messages)


@settings(max_examples=100)
@given(exchanges())
def test_the_adjoint_reverses_every_message_where_source_and_work_have_the_same_replicas(exchange: Exchange) -> None:
    source, needs = exchange
    plans = plans_of(exchange)
    if set(source.axes) != needs.axes:
        return
    for plan in plans:
        assert plan.adjoint.kept == plan.forward.kept
        assert Counter(plan.adjoint.sends) == Counter(plan.forward.receives)
        assert Counter(plan.adjoint.receives) == Counter(plan.forward.sends)


@settings(max_examples=150)
@given(exchanges())
def test_all_ranks_choose_the_same_carrier_and_it_can_carry_the_messages(exchange: Exchange) -> None:
    mesh = exchange[0].mesh
    plans = plans_of(exchange)
    assert len({(plan.carrier, plan.adjoint_carrier, plan.group_axes) for plan in plans}) == 1
    for carrier, direction in zip((plans[0].carrier, plans[0].adjoint_carrier), routes(plans), strict=True):
        for rank, route in enumerate(direction):
            group = set(mesh.group(plans[0].group_axes, rank))
            assert {message.peer for message in (*route.sends, *route.receives)} <= group
            if carrier == "none":
                assert not route.sends
            else:
                assert len(group) > 1
            if carrier == "all_gather":
                given_away = plans[rank].held if direction[rank] is plans[rank].forward else plans[rank].needed
                assert {message.peer for message in route.sends} == group - {rank}
                assert {message.region for message in (*route.sends, *route.receives)} >= {given_away}
                assert {message.region.size for message in (*route.sends, *route.receives)} == {given_away.size}


@settings(max_examples=100)
@given(exchanges())
def test_identity_means_that_no_rank_moves_anything(exchange: Exchange) -> None:
    for plan in plans_of(exchange):
        if plan.is_identity:
            assert not plan.forward.sends
            assert not plan.adjoint.sends
            assert plan.forward.kept == plan.held or not plan.held.size


@settings(max_examples=100)
@given(st.data())
def test_conversions_between_any_two_layouts_give_every_rank_its_box(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    source, target = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    for rank in range(mesh.size):
        plan = plan_conversion(source, target, rank)
        assert plan.held == Region.of(source.box(rank))
        assert plan.needed == Region.of(target.box(rank))
        assert count(plan.forward.kept, *(m.region for m in plan.forward.receives)) == count(plan.needed)


def halo(mesh: Mesh, shape: tuple[int, ...], cut: dict[int, str], window: Window) -> Exchange:
    source = Layout.of(mesh, shape, cut)
    maps = tuple(window if dim in cut else Same() for dim in range(len(shape)))
    return source, demand(source.with_shape(out_shape(maps, shape)), maps, shape)


def test_a_halo_of_three_dims_has_26_neighbours_corners_among_them() -> None:
    mesh = Mesh(depth=3, height=3, width=3)
    exchange = halo(mesh, (9, 9, 9), {0: "depth", 1: "height", 2: "width"}, Window(3, low=1, high=1))
    middle = plans_of(exchange)[13]
    assert middle.carrier == middle.adjoint_carrier == "neighbour"
    assert Counter(message.region.size for message in middle.forward.receives) == {9: 6, 3: 12, 1: 8}


def test_a_halo_wider_than_the_neighbours_receives_from_all_it_crosses() -> None:
    source, needs = halo(Mesh(width=8), (8,), {0: "width"}, Window(7, low=3, high=3))
    plan = plan_exchange(source, needs, 4)
    assert {message.peer for message in plan.forward.receives} == {1, 2, 3, 5, 6, 7}


def test_many_suppliers_make_a_collective() -> None:
    source, needs = halo(Mesh(width=40), (40,), {0: "width"}, Window(31, low=15, high=15))
    assert plan_exchange(source, needs, 0).carrier == "all_to_all"


def test_periodic_borders_of_two_ranks_take_two_pieces_from_one_peer() -> None:
    source, needs = halo(Mesh(width=2), (8,), {0: "width"}, Window(3, low=1, high=1, mode="circular"))
    (message,) = plan_exchange(source, needs, 0).forward.receives
    assert (message.peer, message.region) == (1, Region(((Span(4, 5), Span(7, 8)),)))


def test_gathering_equal_parts_is_an_all_gather_and_its_adjoint_sends_nothing() -> None:
    mesh = Mesh(data=2, width=4)
    cut, whole = Layout.of(mesh, (2, 8), {0: "data", 1: "width"}), Layout.of(mesh, (2, 8), {0: "data"})
    plan = plan_conversion(cut, whole, 5)
    assert (plan.carrier, plan.adjoint_carrier, plan.group_axes) == ("all_gather", "none", ("width",))
    assert [message.peer for message in plan.forward.receives] == [4, 6, 7]
    assert plan_conversion(whole, cut, 5).adjoint_carrier == "all_gather"


@pytest.mark.parametrize("window", [Window(3, stride=2), Window(2, low=-1)], ids=["last index unused", "first unused"])
def test_a_gather_of_less_than_everything_sends_only_what_is_read(window: Window) -> None:
    """For a pooling that drops the last row, on a dim that becomes whole, parts do not travel whole."""
    source = Layout.of(Mesh(width=4), (8,), {0: "width"})
    needs = demand(Layout.of(Mesh(width=4), (window.out_extent(8),)), (window,), (8,))
    plans = [plan_exchange(source, needs, rank) for rank in range(4)]
    assert plans[0].carrier == "neighbour"
    assert sum(plan.forward.elements_sent for plan in plans) == 3 * 7


def test_periodic_borders_of_a_dim_that_is_not_cut_move_nothing() -> None:
    maps: tuple[DimMap, ...] = (Window(1, stride=3, low=1, mode="circular"), Same())
    source = Layout.of(Mesh(width=2), (5, 4), {1: "width"})
    plan = plan_exchange(source, demand(source.with_shape(out_shape(maps, (5, 4))), maps, (5, 4)), 0)
    assert plan.needed.dims[0] == (Span(0, 3), Span(4, 5))
    assert (plan.carrier, plan.adjoint_carrier, plan.forward.sends) == ("none", "none", ())


def test_uneven_parts_are_not_gathered_as_equals() -> None:
    mesh = Mesh(width=4)
    plan = plan_conversion(Layout.of(mesh, (7,), {0: "width"}), Layout.of(mesh, (7,)), 0)
    assert plan.carrier == "neighbour"


def test_nothing_is_needed_of_a_tensor_without_indices() -> None:
    mesh = Mesh(width=4)
    plan = plan_conversion(Layout.of(mesh, (0, 8), {1: "width"}), Layout.of(mesh, (0, 8)), 1)
    assert (plan.carrier, plan.adjoint_carrier) == ("none", "none")


@settings(max_examples=100)
@given(meshes().flatmap(lambda mesh: st.tuples(layouts(mesh, (5, 3)), layouts(mesh, (5, 3)))))
def test_what_stays_in_place_is_planned_as_if_it_moved(pair: tuple[Layout, Layout]) -> None:
    for source, target in (pair, (pair[0], pair[0])):
        owned, needs = Demand.ownership(source), Demand.ownership(target)
        for rank in range(source.mesh.size):
            plan = plan_exchange(source, needs, rank)
            routed = (exchange_plan.route(owned, needs, rank), exchange_plan.route(needs, owned, rank))
            assert (plan.forward, plan.adjoint) == routed
            assert (plan.held, plan.needed, plan.frame) == (owned.region(rank), needs.region(rank), needs.frame(rank))


LAST = 65536


@pytest.mark.parametrize("rank", [0, 1, 40_000, LAST - 1])
def test_a_line_of_65536_ranks(rank: int) -> None:
    window = Window(3, low=1, high=1, mode="circular")
    source, needs = halo(Mesh(depth=LAST), (1, 1, 2 * LAST), {2: "depth"}, window)
    plan = plan_exchange(source, needs, rank)
    assert plan.carrier == plan.adjoint_carrier == "neighbour"
    below, above = (rank - 1) % LAST, (rank + 1) % LAST
    one = ((Span(0, 1),), (Span(0, 1),))
    received = {below: (Span(2 * below + 1, 2 * below + 2),), above: (Span(2 * above, 2 * above + 1),)}
    sent = {below: (Span(2 * rank, 2 * rank + 1),), above: (Span(2 * rank + 1, 2 * rank + 2),)}
    assert {m.peer: m.region for m in plan.forward.receives} == {p: Region((*one, s)) for p, s in received.items()}
    assert {m.peer: m.region for m in plan.forward.sends} == {p: Region((*one, s)) for p, s in sent.items()}
    assert Counter(plan.adjoint.sends) == Counter(plan.forward.receives)


@pytest.mark.parametrize("rank", [0, 12_345, LAST - 1])
def test_a_grid_of_65536_ranks_matches_its_neighbours(rank: int) -> None:
    mesh = Mesh(data=64, depth=16, height=8, width=8)
    cut = {0: "data", 2: "depth", 3: "height", 4: "width"}
    source = Layout.of(mesh, (128, 4, 64, 64, 64), cut)
    window = Window(3, low=1, high=1, mode="circular")
    maps: tuple[DimMap, ...] = (Same(), Same(), window, window, window)
    needs = demand(source, maps, source.shape)
    plan = plan_exchange(source, needs, rank)
    assert len(plan.forward.sends) == len(plan.forward.receives) == 26
    assert plan.forward.elements_received == plan.needed.size - plan.held.size
    for message in plan.forward.sends:
        answer = plan_exchange(source, needs, message.peer)
        assert [m.region for m in answer.forward.receives if m.peer == rank] == [message.region]


def test_a_gather_over_65536_ranks() -> None:
    mesh = Mesh(depth=LAST)
    plan = plan_conversion(Layout.of(mesh, (LAST,), {0: "depth"}), Layout.of(mesh, (LAST,)), 7)
    assert plan.carrier == "all_gather"
    assert plan.forward.elements_received == plan.forward.elements_sent == LAST - 1
