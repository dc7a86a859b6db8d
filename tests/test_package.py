"""The public surface and what importing it costs."""

import subprocess
import sys

import pytest

import convmesh


def test_every_public_name_loads() -> None:
    for name in convmesh.__all__:
        assert getattr(convmesh, name).__name__.rpartition(".")[2] == name
    assert dir(convmesh) == sorted(convmesh.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'meshes'"):
        convmesh.meshes  # noqa: B018


@pytest.mark.parametrize("module", ["convmesh", "convmesh.layout", "convmesh.layout.maps", "convmesh.errors"])
def test_integer_core_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; convmesh.Mesh(data=2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
