"""Weights of a pipeline: a rank holds those of its stages, and knows the names and shapes of the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from convmesh.dist import OpenMesh, all_reduce
from convmesh.graph import Captured
from convmesh.graph.weightless import weightless
from convmesh.plans import Plan
from convmesh.plans.pipeline_rules import own_stages
from convmesh.plans.stage_graph import StageGraph
from convmesh.private_torch.module_tables import buffers_of, parameters_of
from convmesh.runtime.full_state import State, named_tensors


class StageWeights:
    """The whole model without data, and the place on the pipe axis of each of its tensors."""

    def __init__(self, model: nn.Module, captured: Captured, plan: Plan, mesh: OpenMesh) -> None:
        assert plan.pipeline is not None
        row = StageGraph(captured.graph)
        stages = row.stage_weights(row.bounds(plan.pipeline.starts))
        self._mesh, pipe = mesh, plan.mesh.axes["pipe"]
        self.template = weightless(model)
        self.captured = captured.without_weights()
        """The network for lowering batches of other sizes."""
        tensors = {name: id(t) for name, t in _all_tensors(model).items()}
        by_tensor = {tensors[name]: stage for name, stage in stages.items() if name in tensors}
        self.home = {name: by_tensor.get(tensor, 0) % pipe for name, tensor in tensors.items()}
        """By name: the place on the pipe axis."""
        self._mine = own_stages(plan.pipeline, plan.mesh, mesh.rank)[0]

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """All tensors of a state, without data."""
        return dict(named_tensors(self.template))

    def drop_others(self, model: nn.Module) -> None:
        """Remove the tensors of other ranks' stages from the model, which frees their memory."""
        for name, home in self.home.items():
            if home != self._mine:
                path, _, last = name.rpartition(".")
                owner = model.get_submodule(path)
                table = parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)
                table[last] = None

    def everywhere(self, mine: Mapping[str, torch.Tensor], names: Mapping[str, torch.Tensor]) -> State:
        """Whole tensors of all stages, on every rank, in the order of `names`; those that no rank has are omitted."""
        present = torch.tensor([name in mine for name in names], dtype=torch.int32, device=self._mesh.device)
        flags = all_reduce(present, self._mesh, ("pipe",))
        state: State = {}
        for (name, like), is_there in zip(names.items(), flags.tolist(), strict=True):
            if is_there:
                state[name] = self._from(self.home[name], mine.get(name), like)
        return state

    def _from(self, home: int, here: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        device = self._mesh.device
        tensor = torch.empty_like(like, device=device) if here is None else here
        return from_stage(tensor, home, self._mesh).to(device)


def _all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def from_stage(tensor: torch.Tensor, home: int, mesh: OpenMesh) -> torch.Tensor:
    """The tensor of the rank at place `home` on the pipe axis, on all ranks along it."""
    here = mesh.mesh.coordinates(mesh.rank)
    root = mesh.world_rank(mesh.mesh.rank({**here, "pipe": home}))
    wire = tensor.detach().to(mesh.wire_device).contiguous()
    wire = wire.clone() if wire.data_ptr() == tensor.data_ptr() else wire
    # Counted as a chain: each rank but the last passes it on.
    if here["pipe"] != (home - 1) % mesh.mesh.axes["pipe"]:
        mesh.traffic.record("broadcast", wire.nbytes, ("pipe",))
    dist.broadcast(wire, root, group=mesh.group(("pipe",)))
    return wire.to(tensor.device)
