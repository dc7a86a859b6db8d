"""The precision of dry runs: a plan's, as autocast on the kind of device that the mesh stands for."""

from __future__ import annotations

from typing import cast

import torch

from convmesh.dist import OpenMesh
from convmesh.ops.core.autocast import autocast_type
from convmesh.plans import Plan
from convmesh.plans.plan import AUTOCAST, Precision
from convmesh.private_torch.meta_autocast import Cast


def cast_on(mesh: OpenMesh) -> Cast | None:
    """The autocast of a dry mesh's tensors, if its plan asks for one."""
    name = mesh.settings.precision
    return Cast(mesh.stands_for, getattr(torch, AUTOCAST[name])) if name else None


def precision_on(device: torch.device) -> Precision:
    """The precision that is on for a device now: autocast's, or that of the weights."""
    names = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}
    return cast(Precision, names.get(autocast_type(device), ""))


def autocast_for(plan: Plan, device: torch.device) -> torch.autocast:
    """The autocast that a step of the plan runs in."""
    dtype = getattr(torch, AUTOCAST.get(plan.precision, "bfloat16"))
    return torch.autocast(device.type, dtype, enabled=bool(plan.precision))
