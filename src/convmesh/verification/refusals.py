"""Refusing what `verify` cannot do, before anything runs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from convmesh.errors import MeshError, PlanError, ShapeError, UnsupportedError
from convmesh.graph import Graph
from convmesh.graph.checking.small_batches import activations
from convmesh.plans import Plan
from convmesh.verification.shrink import Samples


def check_arguments(model: object, loss: object, target: object, steps: int, most_ranks: int) -> None:
    if dist.is_available() and dist.is_initialized():
        raise MeshError(
            "`verify` starts ranks of its own, but a process group is open here; call it before `cm.init()`, in a "
            "process of its own, or run `convmesh verify`."
        )
    if not isinstance(model, nn.Module):
        raise PlanError(f"`model` (={model!r:.80}) must be a torch.nn.Module.")
    if loss is not None and target is None:
        raise PlanError("`loss` needs a `target`: a tensor, or a function from the shape of a batch to one.")
    for name, value, least in (("steps", steps, 1), ("most_ranks", most_ranks, 1)):
        if not isinstance(value, int) or value < least:
            raise PlanError(f"`{name}` (={value!r}) must be a whole number of at least {least}.")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UnsupportedError(
            "`model` has weights on the meta device, which have no values to train; make it on the CPU, or verify a "
            "narrower version with the same layers: a plan by layer names fits both."
        )


def check_sample(samples: Samples, plan: Plan) -> None:
    """The sample must fit the plan, except for the number of samples."""
    shapes = tuple(shape_of(sample) for sample in samples)
    if plan.shapes and [shape[1:] for shape in shapes] != [tuple(shape[1:]) for shape in plan.shapes]:
        raise ShapeError(
            f"`sample` has shapes {shapes}, but the plan was made for {plan.shapes}; only the number of samples may "
            "differ: make a plan for this shape with `cm.plan`."
        )


def shape_of(sample: torch.Tensor | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sample.shape) if isinstance(sample, torch.Tensor) else sample


def check_memory(graph: Graph, plan: Plan) -> None:
    """Each rank holds weights, gradients and momentum in float64; ranks share activations and their gradients."""
    bytes_needed = 24 * (plan.mesh.size * graph.parameters + 2 * activations(graph))
    bytes_free = _bytes_free()
    if bytes_needed > bytes_free:
        raise UnsupportedError(
            f"`model` needs about {bytes_needed / 2**30:.1f} GiB to train in float64 on {plan.mesh.size} local ranks, "
            f"and this machine has {bytes_free / 2**30:.1f} GiB; lower `most_ranks`, or verify a narrower version with "
            "the same layers."
        )


def _bytes_free() -> int:
    """The memory that Linux has available for new processes; elsewhere all memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
