"""Every way in which a call on a sharded tensor can fail ends in an error of ours that names the call and a way out."""

import copy
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import ConvMeshError, Mesh
from convmesh.ops.core.registry import handled, name_of
from convmesh.testing import RankPool, opened

SHAPE = (4, 3, 8, 8)


def on(mesh: cm.OpenMesh, *shape: int) -> Any:
    whole = torch.ones(shape or SHAPE, device=mesh.device)
    return cm.shard(whole, mesh, {0: "data"})


def learning(mesh: cm.OpenMesh) -> Any:
    x = on(mesh)
    x.requires_grad = True
    return x


MISUSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float(x)": (float, "`float`.*reduce it first"),
    "int(x)": (int, "`int`.*reduce it first"),
    "bool(x)": (bool, "`bool`.*reduce it first"),
    "x.item()": (lambda x: x.item(), "`item`"),
    "complex(x)": (complex, "reduce it first"),
    "list[x]": (lambda x: [1, 2][x], "`index`"),
    "range(float)": (lambda x: range(x.sum()), "`index`"),
    "f'{x:.3f}'": (lambda x: f"{x:.3f}", "`item`"),
    "0 < x < 1": (lambda x: 0 < x < 1, "`bool`"),
    "sorted": (lambda x: sorted([x, x]), "`bool`"),
    "x.numpy()": (lambda x: x.numpy(), r"Tensor.numpy.*x\.gather\(\)\.numpy"),
    "x.tolist()": (lambda x: x.tolist(), r"x\.gather\(\)\.tolist"),
    "np.asarray": (np.asarray, r"numpy.asarray.*x\.gather"),
    "np.sin": (np.sin, "numpy.sin.*torch function"),
    "array * x": (lambda x: np.ones(8) * x, "numpy.multiply.*from_numpy"),
    "array @ x": (lambda x: np.ones((8, 8)) @ x, "numpy.matmul"),
    "torch.as_tensor": (torch.as_tensor, r"torch.as_tensor.*x\.gather"),
    "torch.tensor": (torch.tensor, r"x\.gather"),
    "from_dlpack": (torch.utils.dlpack.from_dlpack, "from_dlpack.*x.gather"),
    "nn.Parameter": (nn.Parameter, "cannot be set"),
    "len of a number": (lambda x: len(x.sum()), "`len`"),
    "iteration over a number": (lambda x: list(x.sum()), "`len`"),
    "del x[0]": (lambda x: operator.delitem(x, 0), r"del x"),
    "x[99]": (lambda x: x[99], "out of range"),
    "x[mask]": (lambda x: x[x > 0], r"holds a Sharded.*x\.gather"),
    "x.add_ of wider": (lambda x: x.add_(torch.ones(2, *SHAPE, device=x.device)), r"x = x\.add\(\.\.\.\)"),
    "x.trace_": (lambda x: x.addmv_(x, x), "no split version"),
    "x += wider": (lambda x: operator.iadd(x, torch.ones(2, *SHAPE, device=x.device)), r"x = x \+ y"),
    "int += float": (lambda x: operator.iadd(x.long(), 0.5), r"x = x \+ y"),
    "out=": (lambda x: torch.add(x, x, out=x), "`out=` has no split version"),
    "plain out=": (lambda x: torch.add(x, 1, out=torch.ones(SHAPE)), "`out=` has no split version"),
    "x @ tensor": (lambda x: x @ torch.ones(1, 5, 8), "`matmul`"),
    "tensor @ x": (lambda x: torch.ones(8, 5) @ x, "matmul"),
    "x << 1": (lambda x: x << 1, "`bitwise_left_shift`"),
    "divmod": (lambda x: divmod(x, 2), "`divmod`"),
    "round": (round, "torch.round"),
    "x + 'a'": (lambda x: x + "a", "`add`.*str"),
    "'a' + x": (lambda x: "a" + x, "`add`.*str"),
    "[1] * x": (lambda x: [1] * x, "`mul`.*list"),
    "object() - x": (lambda x: object() - x, "`sub`.*object"),
    "x * None": (lambda x: x * None, "`mul`.*NoneType"),
    "x < None": (lambda x: x < None, "`lt`.*NoneType"),
    "pickle": (pickle.dumps, r"`pickle`.*x\.gather"),
    "deepcopy of a result": (lambda x: copy.deepcopy(learning(x.mesh) * 2), "`copy.deepcopy`"),
    "x.size(9)": (lambda x: x.size(9), "`Tensor.size`"),
    "x.size('a')": (lambda x: x.size("a"), "`Tensor.size`"),
    "x.nonsense": (lambda x: x.nonsense, "Sharded.nonsense"),
    "x.data": (lambda x: x.data, "Sharded.data"),
    "x.note = 1": (lambda x: setattr(x, "note", 1), "Sharded.note"),
    "x.cpu()": (lambda x: x.cpu(), "Sharded.cpu"),
    "backward of no graph": (lambda x: x.sum().backward(), "`backward`.*does not require grad"),
    "backward of many": (lambda x: learning(x.mesh).backward(), "`backward`.*scalar"),
    "second backward": (lambda x: [(y := learning(x.mesh).square().sum()).backward(), y.backward()], "second time"),
    "requires_grad of an int": (lambda x: setattr(x.long(), "requires_grad", True), "`Tensor.requires_grad_`"),
    "autograd.grad": (lambda x: torch.autograd.grad(x, x), "`grad` has no split version"),
    "autograd.backward": (torch.autograd.backward, "`backward` has no split version"),
    "two meshes": (lambda x: x + on(cm.dry_mesh(Mesh(data=4))), "lives on Mesh.data=.*another on Mesh.data=4"),
    "two meshes in a list": (lambda x: torch.cat([x, on(cm.dry_mesh(Mesh(data=4)))]), "bring them to one mesh"),
    "argmax of two dims": (lambda x: x.argmax((2, 3)), "`Tensor.argmax`.*must be int"),
    "max of a fraction": (lambda x: x.max(1.5), "`Tensor.max`"),
    "softmax": (lambda x: F.softmax(x, dim=9), "`softmax`.*from -4 to 3"),
    "cat of other shapes": (lambda x: torch.cat([x, x[:, :2, 1:]]), "`cat`"),
    "stack of other shapes": (lambda x: torch.stack([x, x[:, :2]]), "`stack`"),
    "add of other shapes": (lambda x: x + x[:, :2], "`add`"),
    "view": (lambda x: x.view(5, -1), "`Tensor.view`.*invalid for input of size 768"),
    "permute": (lambda x: x.permute(0, 1), "`Tensor.permute`"),
    "where of a mask": (lambda x: torch.where(x > 0), "`where`"),
    "einsum": (lambda x: torch.einsum("nchw,nchwd->n", x, x), "`einsum`"),
    "conv of other channels": (lambda x: F.conv2d(x, torch.ones(4, 9, 3, 3)), "`weight`"),
    "conv of other dims": (lambda x: F.conv3d(x, torch.ones(4, 3, 3, 3, 3)), "spatial"),
    "linear": (lambda x: F.linear(x, torch.ones(4, 9)), "`linear`.*9 elements"),
    "mse_loss": (lambda x: F.mse_loss(x, torch.zeros(3, 3)), "`mse_loss`"),
    "cross_entropy of floats": (lambda x: F.cross_entropy(x, torch.zeros(4, 8, 8)), "`cross_entropy`.*class indices"),
    "interpolate": (lambda x: F.interpolate(x, size=(1, 2, 3)), "`interpolate`"),
    "pad": (lambda x: F.pad(x, (1, 2, 3)), "`pad`"),
    "max_pool": (lambda x: F.max_pool2d(x, 0), "`kernel_size`"),
    "batch_norm": (lambda x: F.batch_norm(x, torch.zeros(9), torch.zeros(9)), "`batch_norm`"),
    "group_norm": (lambda x: F.group_norm(x, 2), "`num_groups`"),
    "dropout": (lambda x: F.dropout(x, 1.5), "`dropout`|`p`|probability"),
    "embedding": (lambda x: F.embedding(x, torch.ones(3, 4)), "`embedding`"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x[:, :, 1:]), "`scaled_dot_product_attention`"),
    "redistribute": (lambda x: x.redistribute({9: "data"}), "dim 9"),
}
"""By what a user types: the call, and what its error says."""


def outcome(case: str, mesh: cm.OpenMesh) -> str:
    """The error's message, which must be one of ours."""
    call, says = MISUSES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConvMeshError, match=f"(?s){says}") as caught:
            call(on(mesh))
    return str(caught.value)


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_without_processes(case: str) -> None:
    outcome(case, cm.dry_mesh(Mesh(data=2)))


def outcomes() -> list[str]:
    return [outcome(case, opened(Mesh(data=2))) for case in MISUSES]


def test_misuse_says_the_same_on_every_rank(pools: dict[int, RankPool]) -> None:
    first, second = pools[2].run(outcomes)
    assert first == second


def left_to_torch(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    name = name_of(function)
    if name.startswith("Tensor."):
        return getattr(x, name.removeprefix("Tensor."))(*args, **kwargs)
    return function(x, *args, **kwargs)


BAD_DIMS: tuple[Callable[..., Any], ...] = (
    left_to_torch,
    lambda f, x, dim: left_to_torch(f, x, dim=dim),
    lambda f, x, dim: left_to_torch(f, x, dims=dim),
    lambda f, x, dim: left_to_torch(f, x, 2, dim),
    lambda f, x, dim: left_to_torch(f, x, (0, dim)),
    lambda f, x, dim: left_to_torch(f, x, dim, 0, 1),
    lambda f, x, dim: f([x, x], dim),
    lambda f, x, dim: f([x, x], dim=dim),
)


OWN_WORDS = ("getitem", "setitem", "einsum")
"""Functions whose first arguments are no tensor and dim."""


@pytest.mark.filterwarnings("ignore")
def test_no_operator_fails_otherwise_on_a_bad_dim() -> None:
    """What torch refuses before it calls us, with the words that it has for any tensor, is left to it."""
    x, whole = on(cm.dry_mesh(Mesh(data=2))), torch.empty(SHAPE, device="meta")
    wrong = []
    for function in (f for f in handled() if name_of(f) not in OWN_WORDS and "__" not in name_of(f)):
        for call in BAD_DIMS:
            for dim in (99, -99):
                try:
                    call(function, x, dim)
                except ConvMeshError:
                    continue
                except Exception as error:
                    with pytest.raises(type(error)):
                        call(function, whole, dim)
                    if isinstance(error, (IndexError, RuntimeError)):
                        wrong.append(f"{name_of(function)}: {error!r}")
    assert not wrong


def supported() -> list[Any]:
    """What looks like misuse and is not."""
    x = on(opened(Mesh(data=2)))
    alias, before = x, x.sum().item()
    x += 1
    shared = alias.sum().item() - before
    iterated = sum(part.sum().item() for part in x)
    twin = copy.deepcopy(x)
    twin -= 2
    numbers = (np.float64(2) * x).sum().item(), (np.float32(1) - x).sum().item()
    compared = (x == None, x != "a", None in [x])  # noqa: E711
    moved = x.to("cpu", torch.float64).dtype, x.type_as(x.long()).dtype, x.to(x.long()).dtype
    whole = torch.ones(3, dtype=torch.float64)
    cast = [(type(y) is torch.Tensor, y.dtype) for y in (whole.type_as(x), whole.to(x), whole.type_as(x.long()))]
    cut = x.redistribute({2: "data"}).layout.cuts[2].axes
    values = (2 in x, 3 in x, len(x), int(x.long().sum()), bool(x.sum() > 0), f"{x.sum():.1f}")
    return [shared, iterated, twin.sum().item(), numbers, compared, moved, cast, cut, *values]


def test_what_torch_allows_is_allowed(pools: dict[int, RankPool]) -> None:
    n = 4 * 3 * 8 * 8
    types = torch.float64, torch.int64, torch.int64
    cast = [(True, torch.float32), (True, torch.float32), (True, torch.int64)]
    expected = [n, 2 * n, 0, (4 * n, -n), (False, True, False), types, cast, ("data",), True, False, 4, 2 * n, True]
    for found in pools[2].run(supported):
        assert found == [*expected, f"{2 * n}.0"]


def stays_on_its_device() -> None:
    with pytest.raises(ConvMeshError, match=r"stays on its mesh's device, cpu.*x\.gather\(\)\.to\('meta'\)"):
        on(opened(Mesh(data=2))).to("meta")


def test_shards_stay_on_their_device(pools: dict[int, RankPool]) -> None:
    pools[2].run(stays_on_its_device)


def test_dispatchers_have_the_name_that_users_write() -> None:
    names = [name_of(f) for f in (F.max_pool2d, F.adaptive_max_pool3d, torch.add, torch.Tensor.add, F.relu)]
    assert names == ["max_pool2d", "adaptive_max_pool3d", "add", "Tensor.add", "relu"]
