"""From a run file to the parts of a run, on every rank: data, network, plan, optimiser."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from convmesh.balance.balancer import Balancer
from convmesh.balance.fair_shares import MovePolicy
from convmesh.data import Augment, Loader, Order, SampleStore, Source
from convmesh.dist import open_mesh
from convmesh.errors import CaptureError, ConfigError, ConvMeshError
from convmesh.models import create, find
from convmesh.plans import Plan
from convmesh.runtime import ParallelNet, parallelize
from convmesh.supervise.following import wanted_ranks
from convmesh.train.centre_crop import CentreCrop
from convmesh.train.datasets import test_source, training_source
from convmesh.train.evaluation import metric_names
from convmesh.train.hooks import summary_writer
from convmesh.train.named_losses import Loss, loss_named
from convmesh.train.optimizers import optimizer_for
from convmesh.train.planned import Planned, alone, check_plan, decide, on_hosts_of_job, shared_plan
from convmesh.train.run_config import AugmentConfig, BalanceConfig, DataConfig, RunConfig
from convmesh.train.schedules import Schedule
from convmesh.train.shared_fate import together

GIB = 1 << 30


@dataclass(frozen=True)
class RunParts:
    """What a run file describes, seen from one rank."""

    net: ParallelNet
    optimizer: Optimizer
    loss: Loss
    loader: Loader
    test: Loader | None
    metrics: tuple[str, ...]
    schedule: Schedule
    steps: int
    steps_epoch: int
    planned: Planned | None
    """On the first rank: the plan's text and prediction."""
    balancer: Balancer | None = None


def set_up(config: RunConfig) -> RunParts:
    """Build everything; a mistake that one rank meets is raised on all of them."""
    _see_current_folder()
    with together():
        if config.tensorboard:
            summary_writer()
        source, test = training_source(config.data), test_source(config.data)
        loss = loss_named(config.loss, _target_dtype(source))
        metrics = metric_names(config.evaluation.metrics, _target_dtype(source), len(source.target.shape))
        model = build_model(config, augmented_shape(config.data.augment, source))
        check_plan(config.plan, model, dist.get_world_size(), wanted_ranks())
        steps_epoch = _steps_epoch(config, source)
        samples = _samples_batch(config, dist.get_world_size())
    shape = (samples, *augmented_shape(config.data.augment, source))
    plan, planned = _plan(config, model, shape)
    net = parallelize(
        model,
        plan,
        loss,
        mesh=open_mesh(plan.mesh, [dist.get_rank()]) if config.sync == "async" else None,
        check_loss=config.precision != "fp16",
        compile=config.compile,
    )
    with together():
        loaders = _loaders(config, net, source, test)
        optimizer = optimizer_for(net, config.optimizer)
        balancer = _balancer(config.balance, net)
    steps_run = config.epochs * steps_epoch or config.steps
    return RunParts(
        net=net,
        optimizer=optimizer,
        loss=loss,
        loader=loaders[0],
        test=loaders[1],
        metrics=metrics,
        schedule=Schedule(config.schedule, steps_epoch, steps_run),
        steps=config.steps or steps_run,
        steps_epoch=steps_epoch,
        planned=planned,
        balancer=balancer,
    )


def _samples_batch(config: RunConfig, ranks: int) -> int:
    """Samples in each batch of a loader."""
    if config.sync == "step":
        return config.batch // config.accumulate
    if config.batch < ranks:
        raise ConfigError(
            f"`batch` (={config.batch}) must be at least {ranks} with `sync` (='async'): each of the {ranks} ranks "
            "trains on its part of it at a time."
        )
    return config.batch // ranks


def _plan(config: RunConfig, model: nn.Module, shape: tuple[int, ...]) -> tuple[Plan, Planned | None]:
    """The plan of this rank's network, and what the first rank knows about it."""
    planned = None
    section = on_hosts_of_job(config.plan)
    with together():
        if dist.get_rank() == 0:
            planned = _decided(config.model_copy(update={"plan": section}), model, shape)
    return shared_plan(planned.text if planned else None, model, shape), planned


def _decided(config: RunConfig, model: nn.Module, shape: tuple[int, ...]) -> Planned:
    try:
        return alone(model, shape) if config.sync == "async" else decide(config, model, shape, dist.get_world_size())
    except CaptureError as error:
        raise ConfigError(
            f"{error}. Samples of `data.source` are {shape[1:]}, channels first; volumes of a file that have no "
            "channels get one by `data.args = { add_channel = true }`."
        ) from error


def build_model(config: RunConfig, sample: tuple[int, ...]) -> nn.Module:
    """The network with the weights of the run's seed; an error in the user's own code becomes our message."""
    torch.manual_seed(config.seed)
    sizes = {} if ":" in config.model.name else find(config.model.name).sizes_for(sample)
    try:
        model = create(config.model.name, **{**sizes, **config.model.args})
    except ConvMeshError as error:
        raise ConfigError(f"`model.name` and `model.args`: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"`model.name` (={config.model.name!r}) cannot be built with `model.args` (={config.model.args}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return model.to(torch.float64) if config.precision == "fp64" else model


def augmented_shape(augment: AugmentConfig, source: Source) -> tuple[int, ...]:
    """The shape of one sample as the network receives it."""
    return Augment(crop=augment.crop or None).shape(source.input.shape)


def _loaders(config: RunConfig, net: ParallelNet, source: Source, test: Source | None) -> tuple[Loader, Loader | None]:
    data, dtype = config.data, torch.float64 if config.precision == "fp64" else torch.float32
    samples = _samples_batch(config, dist.get_world_size())
    order = Order(config.seed, len(source), samples)
    train = _loader(data, net, source, order, _augment(data.augment, config.seed), dtype)
    if test is None:
        return train, None
    crop = CentreCrop(crop=data.augment.crop) if data.augment.crop else None
    judged = Order.evaluation(len(test), config.evaluation.batch or samples)
    return train, _loader(data, net, test, judged, crop, dtype)


def _loader(
    config: DataConfig,
    net: ParallelNet,
    source: Source,
    order: Order,
    augment: Augment | None,
    dtype: torch.dtype | None,
) -> Loader:
    store = SampleStore(int(config.store_gib * GIB)) if config.store_gib else None
    return Loader(source, net, order, augment, config.threads, config.prefetch, store, dtype)


def _balancer(config: BalanceConfig, net: ParallelNet) -> Balancer | None:
    if config.mode == "off":
        return None
    return Balancer(net, config.every, MovePolicy(least_gain=config.least_gain, most=config.most))


def _augment(config: AugmentConfig, seed: int) -> Augment | None:
    if config == AugmentConfig():
        return None
    options: dict[str, Any] = config.model_dump()
    return Augment(seed=seed, **{**options, "crop": config.crop or None})


def _steps_epoch(config: RunConfig, source: Source) -> int:
    if len(source) < config.batch:
        raise ConfigError(
            f"`batch` (={config.batch}) must be at most {len(source)}, the number of samples of {source}."
        )
    return len(source) // config.batch


def _target_dtype(source: Source) -> torch.dtype:
    """The type of targets as the network's loss receives them: values, or classes."""
    return torch.float32 if source.target.dtype.kind == "f" else torch.int64


def _see_current_folder() -> None:
    """Let models and datasets in the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
