"""What a run trains and is tested on: generators, files and torch Datasets, as the run file names them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from convmesh.data import GeneratedSource, Source, generator, open_source
from convmesh.data.generators.catalogue_of_generators import GENERATORS, is_generator
from convmesh.errors import ConfigError, DataError, UnknownNameError
from convmesh.models.load import import_factory
from convmesh.train.run_config import DataConfig

TEST_PART = 4
"""A generator's test set has one sample for this many training samples, unless the run file says otherwise."""


def training_source(config: DataConfig) -> Source:
    """The samples to train on."""
    if config.source == "digits":
        return _opened("data.source", "digits", {"split": "train"} | config.args)
    return _opened("data.source", config.source, config.args)


def test_source(config: DataConfig) -> Source | None:
    """The samples to evaluate on, if there are any."""
    if config.test_source:
        return _opened("data.test_source", config.test_source, config.test_args)
    if config.source == "digits":
        return _opened("data.test_source", "digits", {**config.args, "split": "test"} | config.test_args)
    if config.source not in GENERATORS:
        return None
    train = generator(config.source, config.args)
    seed = int(config.args.get("seed", 0)) + 1
    other = {"seed": seed, "samples": max(1, train.samples // TEST_PART)}
    return _opened("data.test_source", config.source, config.args | other | config.test_args)


def _opened(field: str, name: str, args: Mapping[str, Any]) -> Source:
    if name in GENERATORS:
        try:
            return GeneratedSource(generator(name, dict(args)))
        except DataError as error:
            raise ConfigError(f"`{_table(field)}`: {error}") from None
    if ":" in name and not is_generator(name):
        return open_source(_dataset(field, name, args))
    try:
        return open_source(name, **args)
    except DataError as error:
        raise ConfigError(f"`{field}`: {error}") from None
    except TypeError:
        raise ConfigError(_odd_arguments(field, args)) from None


def _table(field: str) -> str:
    """The arguments that belong to a source."""
    return field.replace("source", "args")


def _odd_arguments(field: str, args: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a file of samples."""
    table, known = _table(field), [*inspect.signature(open_source).parameters][1:]
    unknown = [name for name in args if name not in known]
    if unknown:
        return str(UnknownNameError.of(table, unknown[0], known))
    return f"`{table}` (={dict(args)}): these values are not what files of samples take: {', '.join(known)}."


def _dataset(field: str, name: str, args: Mapping[str, Any]) -> Any:
    """The torch Dataset that a user's function makes."""
    make = import_factory(name, field)
    try:
        return make(**args)
    except Exception as error:
        raise ConfigError(f"`{field}` (={name!r}) cannot be made: {type(error).__name__}: {error}") from error
