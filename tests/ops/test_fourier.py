"""Fourier transforms over cut dims, and complex numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh, shard
from convmesh.dist import OpenMesh, Traffic, dry_mesh
from convmesh.layout import Layout
from convmesh.ops.spectral.fourier import with_dim_whole
from convmesh.testing import SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]
on_meshes = pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(width=3), Mesh(height=2, width=2)], ids=str)


def spectrum(x: Any, name: str, dims: tuple[int, ...], extents: tuple[int, ...] | None, norm: str | None) -> Any:
    """Of real numbers, or of complex ones where the transform wants them."""
    values = x if name in ("rfftn", "ihfft") else torch.complex(x, x * x)
    made = getattr(torch.fft, name)(values, extents, dims, norm)
    return torch.view_as_real(made) if made.is_complex() else made


def along_one(x: Any, name: str, dim: int, extent: int | None) -> Any:
    return spectrum(x, name, dim, extent, "ortho")  # type: ignore[arg-type]


def filtered(x: Any) -> Any:
    """There and back, with low frequencies kept."""
    modes = torch.fft.rfft2(x)
    return torch.fft.irfft2(modes[..., :2] * 2, s=x.shape[-2:])


@on_grids
@given(data=st.data())
@draws(4)
@pytest.mark.operator("fftn, ifftn, rfftn, irfftn", "any dims, cut or not; s; norm")
def test_several_dims(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(3, smallest=2, largest=6)))
    name = data.draw(st.sampled_from(["fftn", "ifftn", "rfftn", "irfftn"]))
    dims = tuple(data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 3))])
    sizes = tuple(data.draw(st.integers(1, 7)) for _ in dims) if data.draw(st.booleans()) else None
    norm = data.draw(st.sampled_from([None, "ortho", "forward"]))
    if name == "irfftn" and sizes is None and shape[dims[-1]] < 2:
        return  # torch refuses it, and so do we
    check(SplitCase(partial(spectrum, name=name, dims=dims, extents=sizes, norm=norm), mesh, (shape,)))


@pytest.mark.parametrize("name", ["fftn", "irfftn"])
def test_dims_in_an_order_on_which_torch_fails_without_data(name: str, check: Check) -> None:
    """Torch 2.11 does."""
    call = partial(spectrum, name=name, dims=(0, 3, 2), extents=None, norm=None)
    check(SplitCase(call, Mesh(height=2), ((2, 2, 3, 2, 2),)))


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.operator("fft, ifft, rfft, irfft, hfft, ihfft", "any dim, cut or not; n")
def test_one_dim(name: str, check: Check) -> None:
    for dim, extent in ((2, None), (-1, 6), (0, 3)):
        call: Any = along_one if name not in ("rfft", "ihfft") else along_one_of_real
        check(SplitCase(partial(call, name=name, dim=dim, extent=extent), Mesh(height=2), ((2, 3, 5, 4),)))


def along_one_of_real(x: Any, name: str, dim: int, extent: int | None) -> Any:
    return torch.view_as_real(torch.resolve_conj(getattr(torch.fft, name)(x, extent, dim, "ortho")))


def shifted(x: Any) -> Any:
    return [torch.fft.fftshift(x), torch.fft.ifftshift(x, dim=2), torch.fft.ifftshift(torch.fft.fftshift(x, 3), (2, 3))]


@on_meshes
@pytest.mark.operator("fftshift, ifftshift", "any dims")
def test_shifts(mesh: Mesh, check: Check) -> None:
    check(SplitCase(shifted, mesh, ((3, 2, 5, 4, 7),)))


def rebuilt(x: Any, y: Any) -> list[Any]:
    z = torch.complex(x, y) * torch.polar(x * x + 1, y)
    pairs = torch.stack([z.real, z.imag], -1)
    whole = torch.view_as_complex(pairs)
    moved = torch.roll(z.conj(), 1, -1).flip(2)
    return [
        torch.real(z * moved),
        whole.imag,
        z.abs(),
        z.angle(),
        torch.view_as_real(z @ z.conj().mT),
        z.conj().sum().imag,
    ]


@on_meshes
@pytest.mark.operator("complex numbers", "complex, polar, real, imag, conj, abs, angle, views of pairs, products")
def test_complex_numbers(mesh: Mesh, check: Check) -> None:
    check(SplitCase(rebuilt, mesh, ((3, 2, 5, 4, 6), (3, 2, 5, 4, 6))))


def test_the_axes_of_a_dim_go_to_one_that_is_transformed_already_and_else_to_the_longest() -> None:
    layout = Layout.of(Mesh(height=4), (2, 8, 6, 5), {2: "height"})
    assert with_dim_whole(layout, 2, (3, 2)) == Layout.of(Mesh(height=4), (2, 8, 6, 5), {3: "height"})
    assert with_dim_whole(layout, 2, ()) == Layout.of(Mesh(height=4), (2, 8, 6, 5), {1: "height"})
    tight = Layout.of(Mesh(height=4), (2, 3, 6, 3), {2: "height"})
    assert with_dim_whole(tight, 2, (3,)) == Layout.of(Mesh(height=4), (2, 3, 6, 3))


def transposed_traffic(mesh: OpenMesh) -> Traffic:
    x = shard(torch.zeros(1, 2, 8, 8, dtype=torch.float64, device=mesh.device), mesh, {2: "height"})
    x.requires_grad = True
    with mesh.traffic.watch() as sent:
        modes: Any = torch.fft.fft2(x)
        modes.real.sum().backward()
    return sent


def real_traffic() -> Traffic:
    return transposed_traffic(opened(Mesh(height=2)))


def test_a_transform_over_a_cut_dim_sends_what_others_hold_once_each_way(pools: Pools) -> None:
    real = pools[2].run(real_traffic)
    assert [transposed_traffic(dry_mesh(Mesh(height=2), rank)) for rank in range(2)] == real
    columns = 2 * 4 * 4 * 16  # of two channels, this rank's rows of the other's columns, in complex numbers
    assert real[0].bytes_total - 8 == 2 * columns  # and the sum of the result


@on_meshes
@pytest.mark.operator("rfft2, irfft2", "there and back, with some frequencies kept")
def test_there_and_back(mesh: Mesh, check: Check) -> None:
    check(SplitCase(filtered, mesh, ((2, 2, 5, 8),)))


class SpectralConv(nn.Module):
    """The layer of a Fourier neural operator."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, 2 * modes, modes, 2, dtype=torch.float64) / channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes, kept = torch.fft.rfft2(x), self.modes
        low = torch.cat([modes[:, :, :kept, :kept], modes[:, :, -kept:, :kept]], 2)
        mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(self.weight))
        made = torch.zeros(*x.shape[:3], x.shape[3] // 2 + 1, dtype=mixed.dtype, device=x.device)
        made[:, :, :kept, :kept] = mixed[:, :, :kept]
        made[:, :, -kept:, :kept] = mixed[:, :, kept:]
        back: torch.Tensor = torch.fft.irfft2(made, s=x.shape[-2:])
        return back


class NeuralOperator(nn.Module):
    """A small one: lift, two layers, project."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(4, 2) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        y: torch.Tensor = self.project(x)
        return y


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("spatial", Mesh(height=2)), ("data+filter", Mesh(data=2, filter=2))], ids=str
)
def test_a_fourier_neural_operator_is_exact(strategy: str, mesh: Mesh) -> None:
    model = NeuralOperator().double()
    sample = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    verified = cm.verify(model, sample, cm.plan(model, sample, mesh, strategy), steps=1)
    assert verified.ok, str(verified)
