"""Refusals: every kind has a text, and the text says what is needed, what there is and where."""

import pytest

from convmesh.oracle.search import Refusal, RefusalKind

GIB = 1 << 30


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (
            Refusal(kind=RefusalKind.SAMPLES, subject="data", needed=16, limit=8),
            "data: 16 ranks > 8 samples",
        ),
        (
            Refusal(kind=RefusalKind.ROWS, subject="height", needed=8, limit=14, layer="conv1"),
            "height: 8 ranks of 2 rows > extent 14 of conv1",
        ),
        (
            Refusal(kind=RefusalKind.FILTERS, subject="filter", needed=64, limit=32, layer="conv1"),
            "filter: 64 ranks > 32 filters of conv1",
        ),
        (
            Refusal(kind=RefusalKind.MEMORY, subject="memory", needed=81 * GIB, limit=80 * GIB, layer="{head}"),
            "memory: 81.0 GiB > 80.0 GiB at layer {head}",
        ),
        (
            Refusal(kind=RefusalKind.ERROR, detail="layer {0}: no mesh has that axis"),
            "layer {0}: no mesh has that axis",
        ),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Refusal) else "",
)
def test_a_refusal_tells_the_rule(refusal: Refusal, text: str) -> None:
    assert str(refusal) == text
    assert text.endswith(refusal.rule)


@pytest.mark.parametrize("kind", RefusalKind)
def test_every_kind_has_a_text(kind: RefusalKind) -> None:
    assert str(Refusal(kind=kind, detail="a detail", layer="a layer")).strip()
