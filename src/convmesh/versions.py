"""Versions of installed packages, ConvMesh's own among them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """A package's version; None if it is not installed, or runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def own_version() -> str:
    return version_of("convmesh") or "(from source)"
