"""The generators by name, and sources from specs such as `cosmology:size=32,samples=512`."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, SupportsIndex

from convmesh.data.generators.cosmology import Cosmology
from convmesh.data.generators.digits import Digits
from convmesh.data.generators.fractals import Fractals
from convmesh.data.generators.sample_generator import GeneratedSource, SampleGenerator
from convmesh.errors import DataError, UnknownNameError

GENERATORS: dict[str, type[SampleGenerator]] = {"cosmology": Cosmology, "digits": Digits, "fractals": Fractals}


def is_generator(spec: str) -> bool:
    return spec.partition(":")[0] in GENERATORS


def generated(spec: str) -> GeneratedSource:
    """The source of a spec: a generator's name and its settings."""
    name, _, rest = spec.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    return GeneratedSource(generator(name, {key.strip(): value.strip() for key, _, value in pairs}))


def generator(name: str, settings: dict[str, Any]) -> SampleGenerator:
    """A generator by name; settings may be given as strings."""
    if name not in GENERATORS:
        raise UnknownNameError.of("generator", name, GENERATORS)
    known = inspect.signature(GENERATORS[name]).parameters
    for key in settings:
        if key not in known:
            raise DataError(f"`{key}` (={settings[key]!r}) is no setting of {name}, which has {', '.join(known)}.")
    return GENERATORS[name](**{key: _number(name, key, value, known[key]) for key, value in settings.items()})


def _number(name: str, key: str, value: Any, parameter: inspect.Parameter) -> Any:
    if "int" not in str(parameter.annotation) or value is None:
        return value
    if isinstance(value, str | SupportsIndex) and not isinstance(value, bool):
        with suppress(ValueError):
            return int(value)
    raise DataError(f"`{key}` (={value!r}) of {name} must be a whole number.")
