"""Networks named on the command line, with what is needed to run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from convmesh import models
from convmesh.cli.exits import BadInputError
from convmesh.errors import ConvMeshError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Subject:
    """A network, with its sample shape and task if known."""

    model: nn.Module
    sample: tuple[int, ...] | None = None
    task: models.Task | None = None

    @property
    def loss(self) -> Callable[..., Any] | None:
        return self.task.loss() if self.task else None

    @property
    def target(self) -> Callable[[tuple[int, ...]], Any] | None:
        """Draws a target for a batch, always the same."""
        return partial(_target_of, self.task) if self.task else None


def find_subject(name: str, small: bool, sample: tuple[int, ...] | None = None) -> Subject:
    """A reference network, or the result of `package.module:factory`; modules of the current folder can be imported.

    A reference network whose dense layers depend on the extent of its input cube is built for the extent of `sample`.
    """
    if ":" not in name:
        reference = models.find(name)
        if sample is not None and not small:
            sizes = reference.sizes_for(sample)
            return Subject(_create(name, lambda: reference.create(**sizes)), sample, reference.task)
        version = reference.small() if small else reference
        task = reference.small().task if small else reference.task
        sample = reference.small_sample if small else reference.sample
        return Subject(_create(name, version.create), sample, task)
    if small:
        raise BadInputError(f"`--small` is for reference networks, such as {models.names()[0]}, not for {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return Subject(_create(name, lambda: models.create(name)))


def _create(name: str, create: Callable[[], nn.Module]) -> nn.Module:
    """The network, with the same weights on every call; an error in the user's own code becomes our message."""
    import torch

    torch.manual_seed(0)
    try:
        return create()
    except ConvMeshError:
        raise
    except Exception as error:
        raise BadInputError(f"`model` (={name!r}) cannot be built: {type(error).__name__}: {error}") from error


def _target_of(task: models.Task, shape: tuple[int, ...]) -> Any:
    import torch

    return task.draw_target(shape, torch.Generator().manual_seed(3))
