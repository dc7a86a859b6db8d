"""Checkpoints as one device writes them: weights and optimisers whole in the file, cut on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from convmesh.dist import OpenMesh
from convmesh.private_torch import tree_map
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.runtime.full_state import cut_like, whole


def whole_state(state: Mapping[str, Any], mesh: OpenMesh | None) -> dict[str, Any]:
    """A nested state with whole tensors in place of cut ones; call it on every rank."""
    made: dict[str, Any] = tree_map(lambda x: whole(x, mesh) if mesh is not None and is_dtensor(x) else x, dict(state))
    return made


def loaded_into(module: nn.Module, state: Mapping[str, Any], mesh: OpenMesh | None, strict: bool) -> None:
    """Load a whole state into a module whose weights may be cut."""
    held = module.state_dict(keep_vars=True)
    if mesh is not None:
        state = {name: cut_like(value, held[name], mesh) if name in held else value for name, value in state.items()}
    module.load_state_dict(state, strict=strict)


def optimizer_state_for(optimizer: Optimizer, state: Mapping[str, Any], mesh: OpenMesh | None) -> dict[str, Any]:
    """A whole optimiser state, cut like the parameters."""
    if mesh is None:
        return dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cut = {
        index: {key: _cut(value, parameters[index], mesh) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": cut}


def _cut(value: Any, parameter: torch.Tensor, mesh: OpenMesh) -> Any:
    return cut_like(value, parameter, mesh) if isinstance(value, torch.Tensor) else value
