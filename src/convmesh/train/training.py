"""`convmesh train` on one rank: from a run file to a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from convmesh.asynchronous.async_weights import AsyncWeights
from convmesh.dist import open_mesh
from convmesh.dist.open_mesh import join_job
from convmesh.layout import Mesh
from convmesh.profiling.session import ProfileSession
from convmesh.supervise.pulse import SECONDS_CONNECTING, SECONDS_ENDING, SECONDS_SETTING_UP, Phase, pulse
from convmesh.train.async_loop import AsyncLoop
from convmesh.train.circumstances import circumstances
from convmesh.train.config_files import changes, resolved_text
from convmesh.train.profiling_hook import StepProfiles, keep_prediction
from convmesh.train.run_config import RunConfig
from convmesh.train.run_folder import RunFolder
from convmesh.train.run_place import RunPlace, open_place
from convmesh.train.setting_up import RunParts, set_up
from convmesh.train.trainer import Intervals, Trainer


def train_run(config: RunConfig, folder: Path, resume: bool = False) -> tuple[dict[str, Any], int]:
    """Train as `config` says, on the ranks of this job; the summary, and the signal that ended it early or 0."""
    join_job(_seconds_waiting(config), None, lambda: pulse().beat(Phase.CONNECTING, seconds=SECONDS_CONNECTING))
    place = open_place(folder, resume)
    pulse().beat(Phase.SETTING_UP, seconds=SECONDS_SETTING_UP)
    try:
        parts = set_up(config)
        if place.writer is not None:
            _describe(place.writer, config, parts)
        trainer = trainer_for(config, parts, place, resume)
        return _fitted(trainer, config, parts, place), trainer.stopping.signal
    finally:
        place.close()
        pulse().beat(Phase.ENDING, seconds=SECONDS_ENDING)


def _seconds_waiting(config: RunConfig) -> float:
    """A supervisor names the rank that the others wait for, so it must run out of patience first."""
    return max(2 * config.timeout_seconds, SECONDS_SETTING_UP) if pulse().is_watched else config.timeout_seconds


def _fitted(trainer: Trainer, config: RunConfig, parts: RunParts, place: RunPlace) -> dict[str, Any]:
    """Train, and profile the steps that the run file asks for."""
    if config.sync == "async":
        weights = AsyncWeights(parts.net, open_mesh(Mesh(data=dist.get_world_size())))
        loop = AsyncLoop(parts.loader, weights, config.sync_every)
        return trainer.fit(steps=parts.steps, intervals=_intervals(config), loop=loop)
    if not config.profile_steps:
        return trainer.fit(steps=parts.steps, intervals=_intervals(config))
    if place.writer is not None:
        keep_prediction(parts.planned.prediction if parts.planned else None, place.path)
    session = ProfileSession(parts.net, parts.optimizer, config.accumulate)
    profiles = StepProfiles(session, config.profile_steps, place.path, trainer.progress.step, parts.steps)
    try:
        return trainer.fit(steps=parts.steps, intervals=_intervals(config), hooks=[profiles])
    finally:
        profiles.close()


def trainer_for(config: RunConfig, parts: RunParts, place: RunPlace, resume: bool) -> Trainer:
    """The trainer that a run file describes."""
    prediction = None if parts.planned is None else parts.planned.prediction
    is_async = config.sync == "async"
    return Trainer(
        parts.net,
        parts.optimizer,
        parts.loader,
        test=parts.test,
        loss=parts.loss,
        metrics=parts.metrics,
        schedule=parts.schedule,
        precision=config.precision,
        accumulate=dist.get_world_size() if is_async else config.accumulate,  # batches of the loader in a step
        clip_norm=config.clip_norm,
        seed=config.seed + dist.get_rank() if is_async else config.seed,
        folder=place,
        resume=resume,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        tensorboard=config.tensorboard,
        balancer=parts.balancer,
        predicted_seconds_step=None if prediction is None else config.accumulate * prediction.seconds_step,
    )


def _intervals(config: RunConfig) -> Intervals:
    return Intervals(
        evaluate_epochs=config.evaluation.every_epochs,
        evaluate_steps=config.evaluation.every_steps,
        save_epochs=config.checkpoint.every_epochs,
        save_steps=config.checkpoint.every_steps,
    )


def _describe(folder: RunFolder, config: RunConfig, parts: RunParts) -> None:
    """Write what the run will do, before it does."""
    text = resolved_text(config)
    if any(folder.checkpoints.glob("[0-9]*")) and (changed := changes(folder.read("config.toml"), text)):
        _say(folder, f"goes on with other settings: {', '.join(changed)}")
    folder.write("config.toml", text)
    folder.write("plan.toml", parts.planned.text if parts.planned else "")
    prediction = parts.planned.prediction if parts.planned else None
    unpredicted = {"seconds_step": None, "reason": parts.planned.unpredicted if parts.planned else ""}
    folder.write_json("prediction.json", unpredicted if prediction is None else prediction.to_plain())
    if idle := parts.net.plan.idle_axes:
        _say(
            folder,
            f"ranks along {', '.join(idle)} do the same work: the plan cuts no layer there. Use another "
            "`plan.strategy` or fewer ranks; plan.toml says why.",
        )
    if config.plan.reduction == "hierarchical" and parts.net.plan.reduction == "bucketed":
        _say(
            folder,
            "gradients are summed over all ranks at once, as by `plan.reduction` = 'bucketed': a hierarchical "
            "reduction needs the same number of ranks on every host, 2 or more.",
        )
    folder.write_json("environment.json", circumstances(parts.net.mesh.device))
    if prediction is None and config.plan.predict and unpredicted["reason"]:
        _say(folder, f"no prediction of a step: {unpredicted['reason']}")


def _say(folder: RunFolder, text: str) -> None:
    folder.log(text)
    sys.stderr.write(f"{text}\n")
