"""The norm over whole and cut weights and over stages is that of one device, and the same on every rank."""

import math
from typing import Any

import pytest
import torch

from convmesh import LayoutError, Mesh
from convmesh.gradients.clip import clip_grad_norm_
from convmesh.gradients.reduction import GradientReducer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, assert_same, batches, gradients

Pools = dict[int, RankPool]


def clipped(mesh: Mesh | None, max_norm: float, norm_type: float) -> tuple[float, dict[str, Any]]:
    net = Towers(None if mesh is None else opened(mesh))
    if mesh is not None:
        net.reducer = GradientReducer(opened(mesh), net.axes_of())
    net(batches()[0]).backward()
    if mesh is None:
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm, norm_type)
    else:
        norm = clip_grad_norm_(net.parameters(), max_norm, norm_type)
    return norm.item(), gradients(net)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_equals_torch_on_one_process(mesh: Mesh, max_norm: float, norm_type: float, pools: Pools) -> None:
    norm, grads = pools[1].run(clipped, None, max_norm, norm_type)[0]
    found = pools[mesh.size].run(clipped, mesh, max_norm, norm_type)
    assert len({value for value, _ in found}) == 1
    for value, clipped_grads in found:
        assert value == pytest.approx(norm, rel=1e-12)
        assert_same(clipped_grads, grads)


def norm_of_stages(norm_type: float, broken: float) -> list[float]:
    """Each of two stages has its own parameter; two replicas have the same."""
    mesh = opened(Mesh(pipe=2, data=2))
    stage = mesh.mesh.coordinates(mesh.rank)["pipe"]
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 1.0 + stage)
    whole = clip_grad_norm_(weight, 1.0, norm_type, mesh=mesh).item()
    weight.grad = torch.tensor([1.0, broken if stage else 1.0, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_([weight], 1.0, norm_type, error_if_nonfinite=True, mesh=mesh)
    return [whole, clip_grad_norm_([weight], 1.0, norm_type, mesh=mesh).item()]


def test_stages_count_once_and_a_non_finite_norm_is_non_finite_everywhere(pools: Pools) -> None:
    for norm, broken in pools[4].run(norm_of_stages, 2.0, math.nan):
        assert norm == pytest.approx(math.sqrt(4 * 1 + 4 * 4))
        assert math.isnan(broken)
    for norm, broken in pools[4].run(norm_of_stages, math.inf, math.nan):
        assert norm == 2
        assert math.isnan(broken)
    assert all(broken == math.inf for _, broken in pools[4].run(norm_of_stages, 2.0, math.inf))


def refuses_norm() -> None:
    with pytest.raises(LayoutError, match="norm_type"):
        clip_grad_norm_([], 1.0, 0.0, mesh=opened(Mesh()))


def test_norms_are_positive(pools: Pools) -> None:
    pools[1].run(refuses_norm)
