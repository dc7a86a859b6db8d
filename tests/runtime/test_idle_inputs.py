"""Inputs of stages from which nothing learns."""

import torch

from convmesh.dist import dry_mesh
from convmesh.layout import Layout, Mesh
from convmesh.lowering.parcels import Parcel
from convmesh.ops.core.sharded import Sharded
from convmesh.runtime.pipeline.idle_inputs import idle_inputs


def test_what_results_do_not_depend_on_is_idle() -> None:
    used, idle, deep = (torch.ones(2, requires_grad=True) for _ in range(3))
    results = [used * 2, torch.relu(deep + used).sum()]
    assert idle_inputs(results, [used, idle, deep, torch.ones(2)]) == (1,)


def test_they_get_a_gradient_of_zeros_from_what_is_sent_on() -> None:
    mesh, layout = dry_mesh(Mesh(), 0), Layout.of(Mesh(), (2, 3))
    parcel = Parcel(("y",), (layout,), (torch.float32,), ((),))
    value, idle = torch.ones(2, 3, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)
    (sent,) = parcel.pack([Sharded(value, layout, mesh)], torch.device("cpu"), (idle,))
    sent.backward(torch.arange(6.0))
    assert torch.equal(value.grad, torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]
    assert torch.equal(idle.grad, torch.zeros(4, dtype=torch.float64))  # type: ignore[arg-type]
