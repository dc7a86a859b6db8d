"""Mistakes end in a clear, typed error on every rank at once: never in a hang, never in wrong numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from convmesh import Layout, Mesh, Sharded, from_local, open_mesh, replicated, shard
from convmesh.errors import ConvMeshError, DisagreementError, LayoutError, MeshError, UnsupportedError
from convmesh.layout import Cut, Partition
from convmesh.ops import supported
from convmesh.testing import opened, run_ranks
from tests.conftest import Pools

Mistake = Callable[[], Any]
Caught = tuple[type[Exception], str]


def caught(mistake: Mistake, *args: Any) -> Caught:
    """The error of a mistake on this rank; checks that this rank can still talk to the others."""
    with pytest.raises(ConvMeshError) as raised:
        mistake(*args)
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == dist.get_world_size()
    return raised.type, str(raised.value)


def everywhere(pools: Pools, ranks: int, mistake: Callable[..., Any], *args: Any) -> Caught:
    """The one error that all ranks raise."""
    outcomes = pools[ranks].run(caught, mistake, *args)
    assert len(set(outcomes)) == 1, outcomes
    error: Caught = outcomes[0]
    return error


def line() -> Any:
    return opened(Mesh(height=2))


def square() -> Layout:
    return Layout.of(Mesh(height=2), (1, 1, 4, 4), {2: "height"})


def wrong_shard_on_one_rank() -> None:
    from_local(torch.ones(1, 1, 2 + dist.get_rank(), 4), square(), line())


def test_a_wrong_shard_on_one_rank(pools: Pools) -> None:
    assert everywhere(pools, 2, wrong_shard_on_one_rank) == (
        DisagreementError,
        "`from_local`: rank 1: `local` has shape (1, 1, 3, 4), but Layout(Mesh(height=2), (1, 1, 4, 4), {2: height}) "
        "gives this rank (1, 1, 2, 4)",
    )


def wrong_type_on_one_rank() -> None:
    from_local(torch.ones(1, 1, 2, 4, dtype=[torch.float32, torch.float64][dist.get_rank()]), square(), line())


def gradient_on_one_rank() -> None:
    from_local(torch.ones(1, 1, 2, 4, requires_grad=dist.get_rank() == 0), square(), line())


def uneven_on_one_rank() -> None:
    rows = [(0, 2, 4), (0, 1, 4)][dist.get_rank()]
    layout = square().replacing({2: Cut(("height",), Partition(rows))})
    from_local(torch.ones(1, 1, [2, 3][dist.get_rank()], 4), layout, line())


def another_cut_on_one_rank() -> None:
    shard(torch.ones(1, 1, 4, 4), line(), {2 + dist.get_rank(): "height"})


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (wrong_type_on_one_rank, "from_local"),
        (gradient_on_one_rank, "from_local"),
        (uneven_on_one_rank, "from_local"),
        (another_cut_on_one_rank, "shard"),
    ],
)
def test_ranks_that_disagree_about_a_tensor(mistake: Mistake, name: str, pools: Pools) -> None:
    outcomes = pools[2].run(caught, mistake)
    assert [error for error, _ in outcomes] == [DisagreementError] * 2
    for _, message in outcomes:
        assert message.startswith(f"`{name}` must be the same on every rank, but digests differ: ")
    assert outcomes[0][1] != outcomes[1][1]


def test_a_disagreement_says_what_this_rank_has(pools: Pools) -> None:
    _, message = pools[2].run(caught, gradient_on_one_rank)[0]
    assert message.partition(" Here: ")[2] == (
        "Layout(Mesh(height=2), (1, 1, 4, 4), {2: height}) cut at [(0, 1), (0, 1), (0, 2, 4), (0, 4)], torch.float32 "
        "with gradient"
    )


def open_any(*meshes: Mesh) -> None:
    open_mesh(meshes[dist.get_rank() % len(meshes)])


def test_a_mesh_that_does_not_fit_the_job(pools: Pools) -> None:
    assert everywhere(pools, 4, open_any, Mesh(data=2, depth=3)) == (
        MeshError,
        "`mesh` (=Mesh(data=2, depth=3)) has 6 ranks, but there are 4 ranks of this job; make the product of its axes "
        "4, e.g. Mesh(data=4).",
    )


@pytest.mark.parametrize(
    "other", [Mesh(depth=4), Mesh(depth=2, height=2), Mesh(data=3), Mesh()], ids=["axis", "shape", "size", "single"]
)
def test_ranks_that_disagree_about_the_mesh(other: Mesh, pools: Pools) -> None:
    outcomes = pools[4].run(caught, open_any, Mesh(data=4), Mesh(data=4), Mesh(data=4), other)
    assert [error for error, _ in outcomes] == [DisagreementError] * 4
    for rank, (_, message) in enumerate(outcomes):
        assert message.startswith("`mesh` must be the same on every rank, but digests differ: ")
        assert " on ranks 0, 1, 2; " in message
        assert message.endswith(f"Here: {other if rank == 3 else Mesh(data=4)} over ranks 0 to 3")


def open_over(ranks: list[int], mesh: Mesh) -> None:
    open_mesh(mesh, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        ([0, 0], Mesh(data=2), "`ranks` (=(0, 0)) must be different ranks of this job, which has 0 to 1."),
        ([0, 2], Mesh(data=2), "`ranks` (=(0, 2)) must be different ranks of this job, which has 0 to 1."),
        (
            [1, 0],
            Mesh(data=3),
            "`mesh` (=Mesh(data=3)) has 3 ranks, but there are 2 ranks given; make the product of its axes 2, "
            "e.g. Mesh(data=2).",
        ),
    ],
)
def test_ranks_that_cannot_form_the_mesh(ranks: list[int], mesh: Mesh, message: str, pools: Pools) -> None:
    assert everywhere(pools, 2, open_over, ranks, mesh) == (MeshError, message)


def test_a_rank_outside_the_mesh_that_it_opens() -> None:
    def outside() -> str | None:
        if dist.get_rank() == 0:
            return None
        with pytest.raises(MeshError) as raised:
            open_mesh(Mesh(), ranks=[0])
        return str(raised.value)

    assert run_ranks(2, outside) == [None, "rank 1 opens a mesh over ranks 0; call it on those ranks only."]


def lay_out(cut: dict[int, Any]) -> None:
    shard(torch.ones(1, 1, 4, 4), line(), cut)


def wrong_layout_for_tensor() -> None:
    shard(torch.ones(1, 1, 4, 5), line(), square())


def layout_of_another_mesh() -> None:
    shard(torch.ones(1, 1, 4, 4), opened(Mesh(width=2)), square())


def local_layout_of_another_mesh() -> None:
    from_local(torch.ones(1, 1, 2, 4), square(), opened(Mesh(width=2)))


def redistributed_to_another_shape() -> None:
    x = shard(torch.ones(1, 1, 4, 4), line(), square())
    x.redistribute(Layout.of(Mesh(height=2), (1, 1, 4, 8), {2: "height"}))


@pytest.mark.parametrize(
    ("mistake", "args", "message"),
    [
        (lay_out, ({2: "hieght"},), "`cut` names axis 'hieght', which is not a mesh axis; the axes are pipe, data, "
         "depth, height, width, channel, filter."),
        (lay_out, ({2: "height", 3: "height"},), "`cut` names axis 'height' twice; one axis cuts one dim of a tensor."),
        (lay_out, ({7: "height"},), "`cut` names dim 7, but the tensor has 4 dims: (1, 1, 4, 4)."),
        (wrong_layout_for_tensor, (), "`cut` lays out a tensor of shape (1, 1, 4, 4), but `tensor` has (1, 1, 4, 5)."),
        (layout_of_another_mesh, (), "`cut`: the layout is for Mesh(height=2), but the open mesh is Mesh(width=2)."),
        (redistributed_to_another_shape, (), "`target` (=Layout(Mesh(height=2), (1, 1, 4, 8), {2: height})) must lay "
         "out (1, 1, 4, 4) on Mesh(height=2)."),
    ],
    ids=["unknown axis", "axis twice", "unknown dim", "shape", "mesh", "redistribute"],
)  # fmt: skip
def test_bad_layouts(mistake: Callable[..., Any], args: tuple[Any, ...], message: str, pools: Pools) -> None:
    assert everywhere(pools, 2, mistake, *args) == (LayoutError, message)


def test_a_shard_of_another_mesh(pools: Pools) -> None:
    assert everywhere(pools, 2, local_layout_of_another_mesh) == (
        DisagreementError,
        "`from_local`: rank 0: the layout is for Mesh(height=2), but the open mesh is Mesh(width=2), rank 1: the "
        "layout is for Mesh(height=2), but the open mesh is Mesh(width=2)",
    )


def dtensor(*shape: int, dim: int = 2) -> DTensor:
    return distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (2,)), [Shard(dim)])


def image() -> Sharded:
    return shard(torch.ones(1, 2, 4, 4), line(), {2: "height"})


def dtensor_to_shard() -> None:
    shard(dtensor(1, 2, 4, 4), line(), {2: "height"})


def dtensor_to_from_local() -> None:
    from_local(dtensor(1, 2, 4, 4), Layout.of(Mesh(height=2), (1, 2, 4, 4), {2: "height"}), line())


def dtensor_to_replicated() -> None:
    replicated(dtensor(1, 2, 4, 4), line())


def dtensor_added() -> None:
    image() + dtensor(1, 2, 4, 4)


def added_to_dtensor() -> None:
    dtensor(1, 2, 4, 4) + image()


def dtensor_in_a_list() -> None:
    torch.cat([dtensor(1, 2, 4, 4), image()])  # type: ignore[list-item]


def dtensor_as_weight() -> None:
    F.prelu(image(), dtensor(2, dim=0))  # type: ignore[arg-type]


def dtensor_by_keyword() -> None:
    torch.add(image(), other=dtensor(1, 2, 4, 4))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "mistake",
    [
        dtensor_to_shard, dtensor_to_from_local, dtensor_to_replicated, dtensor_added, added_to_dtensor,
        dtensor_in_a_list, dtensor_as_weight, dtensor_by_keyword,
    ],
)  # fmt: skip
def test_a_raw_dtensor(mistake: Mistake, pools: Pools) -> None:
    assert everywhere(pools, 2, mistake) == (
        UnsupportedError,
        "a DTensor cannot take part in a split operator: torch's convolution on spatially sharded DTensors returns "
        "wrong numbers without an error. Pass `x.to_local()` through `from_local(local, layout, mesh)`, or "
        "`x.full_tensor()` through `shard(x, mesh, cut)`.",
    )


def dtensor_as_bias_alone() -> None:
    F.conv2d(image(), torch.ones(2, 2, 3, 3), dtensor(2, dim=0), padding=1)  # type: ignore[call-overload]


def test_a_cut_bias_with_an_uncut_weight(pools: Pools) -> None:
    """Refused before halos are sent: a local error with messages under way would hang the next collective."""
    assert everywhere(pools, 2, dtensor_as_bias_alone) == (
        UnsupportedError,
        "`bias` is a DTensor but `weight` is not; cut both, or pass `bias.full_tensor()`.",
    )


def unknown_function() -> None:
    torch.linalg.norm(image())


def test_an_unknown_function_names_the_nearest_known_one(pools: Pools) -> None:
    assert everywhere(pools, 2, unknown_function) == (
        UnsupportedError,
        "`linalg.norm` has no split version, so it cannot run on a Sharded tensor; `norm` has one. "
        "`convmesh.ops.supported()` lists all that have one; or gather the tensor first with `x.gather()`.",
    )
    assert {"relu", "add", "conv2d", "cat"} <= set(supported())


def unknown_method() -> None:
    image().cholesky()


def test_an_unknown_method(pools: Pools) -> None:
    error, message = everywhere(pools, 2, unknown_method)
    assert issubclass(error, UnsupportedError)
    assert issubclass(error, AttributeError)
    assert message == "`Sharded.cholesky`: this tensor method has no split version; see `ops.supported()`."


def attributes() -> tuple[bool, bool, bool]:
    x = image()
    return hasattr(x, "relu"), hasattr(x, "cholesky"), hasattr(x, "no_such_thing")


def test_hasattr_knows_the_methods(pools: Pools) -> None:
    assert pools[2].run(attributes) == [(True, False, False)] * 2
