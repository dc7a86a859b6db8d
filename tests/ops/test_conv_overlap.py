"""Interior work runs while halos travel, and the numbers do not change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, shard
from convmesh.dist import Reduction, StepSettings
from convmesh.dist.exchange import PendingExchange, start
from convmesh.kernels.local_conv import convolution, convolution_backward
from convmesh.layout import Box, Layout, Span
from convmesh.layout.maps import Window
from convmesh.layout.terms import split_terms
from convmesh.ops.convolution import conv_function
from convmesh.testing import RankPool, natural_cut, opened
from convmesh.testing.strategies import extents, spatial_dims
from tests.ops.grids import on_grids

CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def output_and_gradients(x: torch.Tensor, weight: torch.Tensor, mesh: Mesh, overlap: bool) -> list[torch.Tensor]:
    whole = shard(x, opened(mesh).with_settings(StepSettings(overlap=overlap)), natural_cut(mesh, x.dim()))
    local, weight = whole.local.requires_grad_(), weight.clone().requires_grad_()
    y = CONV[x.dim() - 2](whole.like(local), weight, padding=[k // 2 for k in weight.shape[2:]])
    cotangent = torch.randn(y.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    return [y.local.detach(), *torch.autograd.grad(y.local, (local, weight), cotangent[y.box.slices()])]


def compare(shape: tuple[int, ...], kernel: tuple[int, ...], mesh: Mesh) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, shape[1], *kernel, dtype=torch.float64, generator=generator)
    runs = [output_and_gradients(x, weight, mesh, overlap) for overlap in (True, False)]
    for overlapped, plain in zip(*runs, strict=True):
        torch.testing.assert_close(overlapped, plain, rtol=1e-12, atol=1e-12)


@on_grids
@given(data=st.data())
def test_same_numbers_without_overlap(mesh: Mesh, data: st.DataObject, pools: dict[int, RankPool]) -> None:
    spatial = data.draw(spatial_dims(mesh))
    kernel = tuple(data.draw(st.sampled_from([1, 3, 5])) for _ in range(spatial))
    shape = (2, 2, *data.draw(extents(spatial, smallest=5, largest=20)))
    pools[mesh.size].run(compare, shape, kernel, mesh)


def order_of_events(mesh: Mesh) -> list[str]:
    """The events of a rank's forward and backward pass, in order."""
    events: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return noted

    patched = pytest.MonkeyPatch()
    patched.setattr(conv_function, "start", note("post", start))
    patched.setattr(PendingExchange, "wait", note("wait", PendingExchange.wait))
    patched.setattr(conv_function, "convolution", note("convolve", convolution))
    patched.setattr(conv_function, "convolution_backward", note("backward", convolution_backward))
    patched.setattr(conv_function, "Reduction", note("post sum", Reduction))
    try:
        output_and_gradients(torch.ones(1, 1, 16, 16), torch.ones(1, 1, 3, 3), mesh, overlap=True)
    finally:
        patched.undo()
    return events


def test_work_runs_between_post_and_wait(pools: dict[int, RankPool]) -> None:
    forward = ["post", "convolve", "wait", "convolve"]
    backward = ["backward", "post", "backward", "post sum", "backward", "wait"]
    for events in pools[2].run(order_of_events, Mesh(height=2)):
        assert events == forward + backward


def held_for_backward(shape: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """Bytes that a split convolution keeps for backward, and those of its shard, halos and weight."""
    x = shard(torch.randn(shape), opened(mesh), natural_cut(mesh, len(shape)))
    x = x.like(x.local.contiguous(memory_format=torch.channels_last_3d).requires_grad_())
    weight = torch.randn(4, shape[1], 3, 3, 3).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        F.conv3d(x, weight, padding=1)  # type: ignore[call-overload]
    box = [Span(max(0, s.start - 1), min(n, s.stop + 1)) for s, n in zip(x.box.spans[2:], shape[2:], strict=True)]
    needed = Box((*x.box.spans[:2], *box))
    return sum(kept.values()), 4 * (needed.size + weight.numel())


@pytest.mark.parametrize("mesh", [Mesh(depth=2), Mesh(depth=2, height=2), Mesh(depth=2, height=2, width=2)], ids=str)
def test_memory_kept_for_backward_is_the_shard_and_its_halo(mesh: Mesh, pools: dict[int, RankPool]) -> None:
    for kept, ideal in pools[mesh.size].run(held_for_backward, (1, 8, 16, 16, 16), mesh):
        assert ideal * 0.95 <= kept <= ideal * 1.05


def no_copy_of_the_activation(mesh: Mesh) -> list[int]:
    """Sizes of the tensors that a forward pass copies, beyond the output's own storage."""
    overlapping = opened(mesh).with_settings(StepSettings(overlap=True))
    x = shard(torch.randn(1, 8, 16, 16, 16), overlapping, natural_cut(mesh, 5))
    x = x.like(x.local.contiguous(memory_format=torch.channels_last_3d))
    weight = torch.randn(8, 8, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as counter:
        F.conv3d(x, weight, padding=1)  # type: ignore[call-overload]
    shapes = [e.input_shapes[0] for e in counter.events() if e.name == "aten::copy_"]
    return [torch.Size(shape).numel() for shape in shapes if shape]


def test_halo_makes_no_copy_of_the_activation(pools: dict[int, RankPool]) -> None:
    shard_size = 8 * 8 * 16 * 16
    for copied in pools[2].run(no_copy_of_the_activation, Mesh(depth=2)):
        assert copied
        assert max(copied) <= shard_size // 8  # one row of eight


def dense_terms(windows: list[Window], shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    """The terms' sources and taps cover every (output, tap) pair inside the input exactly once."""
    work = layout.with_shape([w.out_extent(n) for w, n in zip(windows, shape, strict=True)])
    out = work.box(rank)
    if not out.size:
        return
    terms = split_terms(windows, layout.box(rank), out, shape)
    for dim, (window, span) in enumerate(zip(windows, out.spans, strict=True)):
        lines = [t for t in ([terms.own] if terms.own else []) + list(terms.late) if _is_line(t, terms, dim)]
        for o in range(span.start, span.stop):
            for tap in range(window.kernel):
                index = o * window.stride - window.low + tap * window.dilation
                met = [t for t in lines if _meets(t.dims[dim], o, tap, index)]
                assert len(met) == (0 <= index < shape[dim])


def _is_line(term: Any, terms: Any, dim: int) -> bool:
    """Whether the terms differ from the first one in `dim` only."""
    first = terms.own or terms.late[0]
    return all(term.dims[d].source == first.dims[d].source for d in range(len(term.dims)) if d != dim)


def _meets(dim: Any, out: int, tap: int, index: int) -> bool:
    return bool(
        dim.out.start <= out < dim.out.stop
        and dim.taps.start <= tap < dim.taps.stop
        and dim.source.start <= index < dim.source.stop
    )


@given(data=st.data())
def test_terms_cover_every_tap_once(data: st.DataObject) -> None:
    number = partial(st.integers)
    kernel, stride, dilation = (data.draw(number(1, top)) for top in (5, 3, 2))
    low, high = data.draw(number(0, 3)), data.draw(number(0, 3))
    window = Window(kernel, stride, dilation, low, high)
    extent = max(window.reach - low - high, data.draw(number(1, 20)), 1)
    mesh = Mesh(width=data.draw(number(1, 5)))
    layout = Layout.of(mesh, (extent,), {0: "width"} if mesh.axes else {})
    for rank in range(mesh.size):
        dense_terms([window], (extent,), layout, rank)
