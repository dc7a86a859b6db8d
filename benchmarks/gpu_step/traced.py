"""ConvMesh's whole step, traced once from its own operators and compiled."""

from __future__ import annotations

from typing import Any

import torch
from convmesh.runtime.traced_step import trace_step
from torch._inductor.compile_fx import compile_fx

import convmesh as cm
from benchmarks.gpu_step.cases import DEVICE, Case
from benchmarks.gpu_step.trainings import Training


def traced_training(case: Case, last: bool) -> Training:
    """A step whose forward and backward are one compiled graph; gradients are left on the parameters."""
    model = case.create(last)
    plan = cm.plan(model, case.shape, cm.Mesh(data=1), "data")
    net = cm.parallelize(model, plan, loss=case.loss(), check_loss=False)
    x, target = case.batch(last)
    x, target = net.shard_input(x), net.shard_target(target)
    with torch.autocast(DEVICE, torch.bfloat16):
        traced = trace_step(net, (x, target), fuse=True)
    seeds = traced.seeds.to(DEVICE)
    args = (torch.ones((), device=DEVICE), seeds, *traced.held, x, target)
    compiled: Any = compile_fx(traced.module, list(args))
    optimizer = torch.optim.SGD(traced.parameters, lr=1e-4, momentum=0.9, fused=True) if case.updates else None

    @torch.no_grad()
    def step() -> torch.Tensor:
        for parameter in traced.parameters:
            parameter.grad = None
        loss: torch.Tensor
        loss, *grads = compiled(*args)
        for parameter, grad in zip(traced.parameters, grads, strict=True):
            parameter.grad = grad
        if optimizer is not None:
            optimizer.step()
        return loss

    def draw() -> None:
        if traced.masks:
            seeds[: traced.masks].copy_(traced.draw()[: traced.masks])

    return Training(step, traced.parameters, draw)
