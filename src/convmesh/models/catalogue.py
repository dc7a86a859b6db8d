"""All reference networks by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convmesh.errors import UnknownNameError
from convmesh.models.load import build, import_factory
from convmesh.models.reference import Reference
from convmesh.models.references import REFERENCES

if TYPE_CHECKING:
    from torch import nn

_by_name = {reference.name: reference for reference in REFERENCES}
_by_factory = {reference.factory.replace("_", "-"): reference for reference in REFERENCES}


def names() -> list[str]:
    """The names of the reference networks."""
    return sorted(_by_name)


def find(name: str) -> Reference:
    """The reference network with this name or factory name; hyphens and underscores are equivalent."""
    hyphenated = name.lower().replace("_", "-")
    by_any_name = _by_factory | _by_name
    if hyphenated not in by_any_name:
        raise UnknownNameError.of("model", name, by_any_name)
    return by_any_name[hyphenated]


def create(model: str, **sizes: Any) -> nn.Module:
    """A reference network by name, or the result of `package.module:factory`."""
    if ":" in model:
        return build(model, import_factory(model), sizes)
    return find(model).create(**sizes)
