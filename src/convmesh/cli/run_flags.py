"""Fields of a run file as flags: read here, and checked together with the rules and the words for files."""

from __future__ import annotations

from typing import Any, get_type_hints

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from convmesh.train.config_files import config_of
from convmesh.train.run_config import RunConfig, Section


def run_flags() -> ConstructorRegistry:
    """How tyro makes sections: unchecked, since of a wrong value it would show what pydantic says of that section."""
    registry = ConstructorRegistry()
    registry.struct_rule(_unchecked)
    return registry


def checked(config: RunConfig) -> RunConfig:
    """What was typed, over the fields of the file; all mistakes at once."""
    return config_of(config.model_dump(warnings=False), "the command line")


def _unchecked(info: StructTypeInfo) -> StructConstructorSpec | None:
    section: Any = info.type
    if not (isinstance(section, type) and issubclass(section, Section)):
        return None

    def made(**values: Any) -> Any:
        return section.model_construct(**values)

    made.__doc__ = section.__doc__  # the help's line for a section
    kinds = get_type_hints(section, include_extras=True)
    fields = [
        StructFieldSpec(name, kinds[name], _default(info.default, name, field), helptext=field.description)
        for name, field in section.model_fields.items()
    ]
    return StructConstructorSpec(instantiate=made, fields=tuple(fields))


def _default(given: Any, name: str, field: Any) -> Any:
    """That of the file, or of the section."""
    return getattr(given, name) if isinstance(given, Section) else field.default
