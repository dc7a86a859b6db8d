"""What a user names as a run: a file, or a function that returns one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convmesh.errors import ConfigError
from convmesh.models.load import import_factory
from convmesh.train.config_files import config_of, load_config, mistakes_of
from convmesh.train.run_config import RunConfig, Section


def run_name(config: str) -> str:
    """The name of the file or of the function."""
    return config.rpartition(":")[2] if ":" in config else Path(config).stem


def config_from(config: str) -> RunConfig:
    """The run of a file, or of package.module:function; modules of the current folder can be imported."""
    if ":" not in config or Path(config).exists():
        return load_config(config)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    made = _made(import_factory(config, "RUN.TOML"), config)
    if isinstance(made, dict):
        return config_of(made, config)
    if not isinstance(made, RunConfig):
        raise ConfigError(
            f"`{config}` returned a {type(made).__name__}; it must return a convmesh.RunConfig or nested dictionaries."
        )
    return made


def _made(function: Callable[[], Any], name: str) -> Any:
    """What the user's function returns; an error in their code is theirs."""
    try:
        return function()
    except ValidationError as error:
        section = {each.__name__: each for each in Section.__subclasses__()}.get(error.title)
        told = str(error) if section is None else mistakes_of(error, section, f"{name}: {error.title}")
        raise ConfigError(told) from error
    except Exception as error:
        raise ConfigError(f"`{name}` failed: {type(error).__name__}: {error}") from error
