"""Training steps of a case on one GPU, by torch and by ConvMesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import convmesh as cm
from benchmarks.gpu_step.cases import DEVICE, Case

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Training:
    """A step that returns its loss, and the parameters whose gradients it leaves behind."""

    step: Step
    parameters: Sequence[torch.Tensor]
    before: Callable[[], None] = lambda: None
    """Runs before each step, and is no part of its graph."""


def training(case: Case, parameters: Sequence[nn.Parameter], loss_of: Step) -> Training:
    """A whole training step around a loss."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True) if case.updates else None

    def step() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return Training(step, parameters)


def torch_training(case: Case, last: bool, mode: str | None) -> Training:
    """Plain torch: eager, or compiled in one of its modes."""
    model = case.create(last)
    x, target = case.batch(last)
    run = model if mode is None else torch.compile(model, mode=None if mode == "default" else mode)
    loss = case.loss()
    return training(case, list(model.parameters()), lambda: loss(run(x), target))


def our_training(case: Case, last: bool, compiling: bool | str = False) -> Training:
    """ConvMesh on one rank: eager, or its whole step traced and compiled."""
    model = case.create(last)
    plan = cm.plan(model, case.shape, cm.Mesh(data=1), "data")
    net = cm.parallelize(model, plan, loss=case.loss(), compile=compiling)
    x, target = case.batch(last)
    x, target = net.shard_input(x), net.shard_target(target)
    return training(case, list(net.parameters()), lambda: net(x, target))


def captured(step: Step) -> Step:
    """The same step as one CUDA graph. Masks of dropout stay those of the captured step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(_keeps: Step = step) -> torch.Tensor:
        # The graph reads and writes memory that the step owns: weights, batch, momentum.
        graph.replay()
        return loss

    return replay
