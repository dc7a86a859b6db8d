"""Reading run files: `extends`, paths, and every mistake of a file at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from convmesh.errors import ConfigError
from convmesh.plans.summing import LOW_RANK
from convmesh.toml_files import NotTomlError, parse_toml
from convmesh.train.run_config import RunConfig, Section

Place = Sequence[int | str]
"""Where a value is: the keys that lead to it."""

PATHS = (("data", "source"), ("data", "test_source"), ("plan", "strategy"), ("plan", "system"))
"""Fields that may name files; those of a run file are relative to its folder."""


def load_config(path: str | Path) -> RunConfig:
    """The run file at `path`, with those that it extends."""
    chosen = Path(path)
    files = _files(chosen, ())
    merged: dict[str, Any] = {}
    for file in reversed(files):
        merged = _merged(merged, file.tables)
    return config_of(merged, str(chosen), files)


@dataclass(frozen=True)
class RunFile:
    """What one file says, without those that it extends."""

    path: Path
    tables: dict[str, Any]


def config_of(tables: Mapping[str, Any], name: str, files: Sequence[RunFile] = ()) -> RunConfig:
    """A checked run from nested tables. Errors call them `name`, and tell which of `files` a mistake is in if that is
    not the first."""
    values = _as_tuples(tables)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors()
        told = [_told(each) + _whereabouts(each["loc"], tables, files) for each in mistakes]
        raise ConfigError(_listed(name, told + _further(values, [each["loc"] for each in mistakes]))) from None
    check(config, name)
    return config


def mistakes_of(error: ValidationError, section: type[Section], name: str) -> str:
    """All that pydantic found wrong in a section, in our words; `name` is where it was written."""
    return _listed(name, [_told(each, section) for each in error.errors()])


def _whereabouts(place: Place, tables: Mapping[str, Any], files: Sequence[RunFile]) -> str:
    """Which of the files has what is wrong; nothing if it is the first, which was named."""
    wrong = _at(tables, place)
    source = next((number for number, file in enumerate(files) if _at(file.tables, place) is wrong), 0)
    return f" It is in {files[source].path}." if source else ""


def _at(tables: Any, place: Place) -> Any:
    """The value that a mistake is about, or as much of it as is written; the same object in the file and in a merge."""
    for key in place:
        if not isinstance(tables, Mapping) or key not in tables:
            break
        tables = tables[key]
    return tables


def _further(values: dict[str, Any], places: Sequence[Place]) -> list[str]:
    """What is contradictory besides: among the fields that are not wrong by themselves."""
    for place in places:
        _drop(values, place)
    wrong = [".".join(map(str, place)) for place in places]
    contradictions = [text for is_wrong, text in _contradictions(RunConfig.model_validate(values)) if is_wrong]
    return [text for text in contradictions if not any(f"`{name}`" in text for name in wrong)]


def _drop(values: dict[Any, Any], place: Place) -> None:
    """Leave out what a mistake is about; a list or a free table as a whole."""
    *sections, last = place
    for key in sections:
        if not isinstance(values.get(key), dict):
            last = key
            break
        values = values[key]
    values.pop(last, None)


def check(config: RunConfig, name: str) -> None:
    """Refuse values that contradict each other."""
    problems = [text for is_wrong, text in _contradictions(config) if is_wrong]
    if problems:
        raise ConfigError(_listed(name, problems))


def resolved_text(config: RunConfig) -> str:
    """A self-contained run file for `config`: it extends nothing, and its paths are absolute."""
    tables = config.model_dump(mode="json")
    for section, key in PATHS:
        tables[section][key] = _absolute(tables[section][key], Path.cwd())
    return tomli_w.dumps(tables)


def changes(before: str, after: str) -> list[str]:
    """The fields in which two resolved texts differ, `batch 16 -> 32`; none if the first is no longer a run file."""
    try:
        old, new = (_flat(parse_toml(text.encode())) for text in (before, after))
    except NotTomlError:
        return []
    return [f"{name} {old.get(name)} -> {value}" for name, value in new.items() if old.get(name) != value]


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        is_section = isinstance(value, dict) and f"{prefix}{key}" not in all_fields()
        flat |= _flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def _files(path: Path, chain: tuple[Path, ...]) -> list[RunFile]:
    """A file and those that it extends, one after the other."""
    try:
        tables = parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"run file {str(path)!r}: {error.strerror}.{_offer(path)}") from None
    except NotTomlError as error:
        raise ConfigError(f"{path}: {error}.") from None
    base = tables.pop("extends", None)
    _make_paths_absolute(tables, path.parent)
    if base is None:
        return [RunFile(path, tables)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: `extends` (={base!r}) must be the path of another run file.")
    below, here = (path.parent / base).resolve(), path.resolve()
    if below in (*chain, here):
        circle = " -> ".join(each.name for each in (*chain, here, below))
        raise ConfigError(f"{path}: `extends` (={base!r}) leads back to a file that it starts from: {circle}.")
    return [RunFile(path, tables), *_files(below, (*chain, here))]


def _offer(path: Path) -> str:
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _make_paths_absolute(tables: dict[str, Any], folder: Path) -> None:
    for section, key in PATHS:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _absolute(table[key], folder)


def _absolute(value: str, folder: Path) -> str:
    """The absolute path of an existing file; names of generators, presets and systems stay as they are."""
    looks_like_a_path = "/" in value or "." in value
    return str((folder / value).resolve()) if looks_like_a_path and (folder / value).exists() else value


def _merged(base: dict[str, Any], above: Mapping[str, Any], section: Any = RunConfig) -> dict[str, Any]:
    """Sections are merged key by key; tables without fixed keys, such as a model's arguments, are replaced whole."""
    merged = dict(base)
    for key, value in above.items():
        inner = _section(section, key)
        both = inner is not None and isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value, inner) if both else value
    return merged


def _section(section: Any, key: str) -> Any:
    """The section that a key of another one holds, or None."""
    field = section.model_fields.get(key)
    kind = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value


def _told(error: Any, section: type[Section] = RunConfig) -> str:
    """One of pydantic's errors in our words."""
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return _unknown(place, section)
    if error["type"] == "model_type":
        return f"`{'.'.join(place)}` (={error['input']!r}) must be a table: [{'.'.join(place)}]."
    rule = error["msg"].replace("Input should be", "must be").replace("should have", "must have")
    return f"`{'.'.join(place)}` (={error['input']!r}) {rule}{'' if rule.endswith('?') else '.'}"


def _unknown(place: Sequence[str], section: type[Section]) -> str:
    fields = _fields_at(place[:-1], section)
    near = difflib.get_close_matches(place[-1], fields, 1, cutoff=0.55)
    elsewhere = [path for path in all_fields() if path.rpartition(".")[2] == place[-1]]
    if elsewhere:
        offer = f"did you mean `{elsewhere[0]}`?"
    else:
        offer = f"did you mean `{near[0]}`?" if near else f"the names here are {', '.join(fields)}."
    return f"`{'.'.join(place)}` is unknown; {offer}"


def _fields_at(place: Sequence[str], section: type[Section]) -> list[str]:
    model: Any = section
    for name in place:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def all_fields(section: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every field of a run file by its dotted name, with pydantic's description of it."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = _section(section, name)
        fields |= {f"{prefix}{name}": field} if inner is None else all_fields(inner, f"{prefix}{name}.")
    return fields


def _listed(name: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{name}: {problems[0]}"
    return "\n".join([f"{name} has {len(problems)} mistakes:", *(f"  {problem}" for problem in problems)])


def _contradictions(config: RunConfig) -> list[tuple[bool, str]]:
    return [*_of_parts(config), *(_of_async(config) if config.sync == "async" else ())]


def _of_async(config: RunConfig) -> list[tuple[bool, str]]:
    """Ranks that train alone have their own whole networks and samples, and share nothing in a step."""
    needs = "`sync` (='async') needs"
    return [
        (
            config.plan.strategy != "data" or not {*config.plan.mesh} <= {"data"},
            f"{needs} `plan.strategy` = 'data' and no other axis (it is {config.plan.strategy!r} on "
            f"{config.plan.mesh or 'any mesh'}): every rank trains the whole network.",
        ),
        (config.accumulate > 1, f"{needs} `accumulate` = 1 (it is {config.accumulate}); use a smaller `batch`."),
        (config.plan.reduction != "bucketed", f"{needs} `plan.reduction` = 'bucketed': optimisers are whole too."),
        (config.plan.compression != "none", f"{needs} `plan.compression` = 'none': no gradients are summed."),
        (
            config.balance.mode != "off",
            f"{needs} `balance.mode` = 'off': ranks take batches at their own pace already.",
        ),
        (config.profile_steps > 0, f"{needs} `profile_steps` = 0: profiles line up the transfers of steps."),
    ]


def _of_parts(config: RunConfig) -> list[tuple[bool, str]]:
    layerwise = config.optimizer.name in ("lars", "lamb")
    divisors = [n for n in range(1, config.batch + 1) if config.batch % n == 0]
    return [
        (
            config.batch % config.accumulate != 0,
            f"`accumulate` (={config.accumulate}) must divide `batch` (={config.batch}); "
            f"use {min(divisors, key=lambda n: abs(n - config.accumulate))}.",
        ),
        (not config.epochs and not config.steps, "`epochs` and `steps` are both 0; one of them must say how long."),
        (
            layerwise and config.plan.reduction == "sharded",
            f"`optimizer.name` (={config.optimizer.name!r}) needs whole weights; with `plan.reduction` (='sharded') "
            "each rank has runs of them: use sgd or adamw, or reduction = 'bucketed'.",
        ),
        (
            config.plan.compression.startswith(LOW_RANK) and config.plan.reduction != "bucketed",
            f"`plan.compression` (={config.plan.compression!r}) needs `plan.reduction` = 'bucketed', "
            "or use 'bf16', which works with all.",
        ),
        (
            config.plan.compression.startswith(LOW_RANK) and config.precision == "fp16",
            f"`plan.compression` (={config.plan.compression!r}) cannot be used with `precision` = 'fp16', whose "
            "gradients are scaled: what a step leaves for the next would have another scale; use bf16 for one of them.",
        ),
        (
            config.optimizer.nesterov and not config.optimizer.momentum,
            "`optimizer.nesterov` (=True) needs `optimizer.momentum` above 0.",
        ),
        (
            config.schedule.name == "step" and not config.schedule.milestones,
            "`schedule.name` (='step') needs `schedule.milestones`, the epochs after which the rate falls.",
        ),
        (
            config.plan.strategy.endswith(".toml") and bool(config.plan.mesh),
            "`plan.mesh` is given, but a plan file has its own mesh; leave `plan.mesh` out.",
        ),
    ]
