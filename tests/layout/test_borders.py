"""What lies beyond the borders, against `F.pad`."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.errors import UnsupportedError
from convmesh.layout import Span
from convmesh.layout.borders import PaddingMode, check_padding, fold
from convmesh.layout.box import merge

MODES: dict[PaddingMode, str] = {
    "zeros": "constant",
    "circular": "circular",
    "reflect": "reflect",
    "replicate": "replicate",
}


def folded(extended: Span, extent: int, mode: PaddingMode) -> list[int]:
    """The values of `extended` of a tensor that holds 1, 2, …, assembled from the pieces."""
    values = [0] * extended.extent
    for piece in fold(extended, extent, mode):
        source = list(range(piece.source.start + 1, piece.source.stop + 1))
        if piece.order == "reversed":
            source.reverse()
        elif piece.order == "repeated":
            source *= piece.target.extent
        place = piece.target.shift(-extended.start)
        assert len(source) == place.extent
        values[place.slice()] = source
    return values


def padded(extent: int, low: int, high: int, mode: PaddingMode) -> list[int]:
    numbers = torch.arange(1, extent + 1, dtype=torch.float64).view(1, 1, -1)
    return [int(v) for v in F.pad(numbers, (low, high), mode=MODES[mode]).flatten().tolist()]


@settings(max_examples=150)
@given(st.sampled_from(list(MODES)), st.integers(1, 9), st.data())
def test_assembled_pieces_equal_f_pad(mode: PaddingMode, extent: int, data: st.DataObject) -> None:
    most = {"circular": extent, "reflect": extent - 1}.get(mode, 6)
    low, high = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
    start = data.draw(st.integers(-low, extent + high - 1))
    stop = data.draw(st.integers(start + 1, extent + high))
    expected = padded(extent, low, high, mode)[start + low : stop + low]
    assert folded(Span(start, stop), extent, mode) == expected


@settings(max_examples=50)
@given(st.sampled_from(list(MODES)), st.integers(1, 9), st.data())
def test_sources_lie_inside_the_dim(mode: PaddingMode, extent: int, data: st.DataObject) -> None:
    most = {"circular": extent, "reflect": extent - 1}.get(mode, 6)
    extended = Span(-data.draw(st.integers(0, most)), extent + data.draw(st.integers(0, most)))
    assert merge(piece.source for piece in fold(extended, extent, mode)) == (Span(0, extent),)


def test_a_span_inside_the_dim_is_its_own_source() -> None:
    for mode in MODES:
        (piece,) = fold(Span(2, 5), 8, mode)
        assert (piece.target, piece.source, piece.order) == (Span(2, 5), Span(2, 5), "same")


@pytest.mark.parametrize(
    ("mode", "pads", "extent", "message"),
    [
        ("mirror", (1, 1), 4, "`padding_mode` (='mirror') must be one of zeros, circular, reflect, replicate."),
        ("circular", (1, 5), 4, "`padding` (=5) must be at most 4 for circular padding of extent 4."),
        ("reflect", (4, 0), 4, "`padding` (=4) must be at most 3 for reflect padding of extent 4."),
    ],
)
def test_impossible_padding_is_refused(mode: str, pads: tuple[int, int], extent: int, message: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        check_padding(mode, pads, extent)
    assert str(raised.value) == message


@given(st.sampled_from(list(MODES)), st.integers(1, 6), st.integers(0, 9))
def test_padding_is_refused_where_torch_refuses_it(mode: PaddingMode, extent: int, pad: int) -> None:
    try:
        padded(extent, pad, 0, mode)
    except RuntimeError:
        with pytest.raises(UnsupportedError):
            check_padding(mode, (pad, 0), extent)
    else:
        assert check_padding(mode, (pad, 0), extent) == mode
