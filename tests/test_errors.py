"""Errors are typed, and Python's built-in types catch them too."""

import pytest

import convmesh
from convmesh import errors
from convmesh.errors import ConvMeshError, DisagreementError, LayoutError, MeshError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (MeshError, ValueError),
        (LayoutError, ValueError),
        (UnsupportedError, NotImplementedError),
        (DisagreementError, RuntimeError),
    ],
)
def test_errors_have_one_base_and_a_type_of_python(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, ConvMeshError)
    assert issubclass(error, builtin)


def test_every_error_is_public() -> None:
    own = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.__name__ for kind in own} <= set(convmesh.__all__)
