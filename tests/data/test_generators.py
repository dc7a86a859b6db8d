"""Generated samples are functions of seed and index, and their targets are true."""

import subprocess
import sys

import numpy as np
import pytest

from convmesh.data import generator, open_source
from convmesh.data.generators.cosmology import AMPLITUDES, INDICES, WAVES_PIVOT
from convmesh.data.generators.digits import _images
from convmesh.errors import DataError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "settings"), [("cosmology", {"size": 12}), ("fractals", {"size": 16}), ("digits", {})]
)
def test_samples_are_functions_of_their_index(name: str, settings: dict[str, int]) -> None:
    first, again = generator(name, settings), generator(name, settings)
    for index in (3, 0):
        for a, b, spec in zip(first.sample(index), again.sample(index), (first.input, first.target), strict=True):
            assert np.array_equal(a, b)
            assert (a.shape, a.dtype) == (spec.shape, spec.dtype)
    assert not np.array_equal(first.sample(0)[0], first.sample(1)[0])


def test_spectra_are_those_of_the_targets() -> None:
    """A straight line through log P(k) has the spectral index as its slope, and the amplitude at the pivot."""
    made = generator("cosmology", {"size": 48, "samples": 8})
    wave = np.fft.fftfreq(48, 1 / 48)
    size = np.sqrt(sum(axis**2 for axis in np.meshgrid(wave, wave, wave, indexing="ij")))
    chosen = (size >= 2) & (size <= 20)
    for index in range(8):
        field, target = made.sample(index)
        power = np.abs(np.fft.fftn(field[0].astype(float))) ** 2 / field[0].size
        # log of the mean lies above the mean of the log by Euler's constant: each mode is exponentially distributed
        slope, height = np.polyfit(np.log(size[chosen] / WAVES_PIVOT), np.log(power[chosen]) + np.euler_gamma, 1)
        spectral, amplitude = (low + (high - low) * (t + 1) / 2 for (low, high), t in
                               zip((INDICES, AMPLITUDES), target, strict=True))  # fmt: skip
        assert abs(slope - spectral) < 0.1
        assert abs(np.exp(height / 2) - amplitude) < 0.1


def test_channels_of_cosmology_are_times() -> None:
    field, _ = generator("cosmology", {"size": 8, "channels": 4}).sample(0)
    assert field.shape == (4, 8, 8, 8)
    assert np.allclose(field[1], 0.8 * field[0])


def test_fractals_have_all_classes_and_shine() -> None:
    made = generator("fractals", {"size": 48, "classes": 4, "fractals": 8})
    volume, labels = made.sample(0)
    assert set(np.unique(labels)) == {0, 1, 2, 3}
    assert volume[0][labels > 0].mean() > 5 * abs(volume[0][labels == 0]).mean()
    assert 0.01 < (labels > 0).mean() < 0.5


def test_digits_are_dealt_to_training_and_test() -> None:
    train, test, whole = (open_source(f"digits:split={split}") for split in ("train", "test", "all"))
    assert (len(train), len(test), len(whole)) == (1438, 359, 1797)
    assert test.input.shape == (1, 32, 32)
    assert np.array_equal(test.read(0), whole.read(4))
    assert int(test.read_target(0)) == int(whole.read_target(4))
    assert train.read(0).min() == -1


def test_digits_are_those_of_scikit_learn_without_importing_it() -> None:
    from sklearn.datasets import load_digits

    images, classes = _images()
    known = load_digits()
    assert np.array_equal(images, known.images)
    assert np.array_equal(classes, known.target)
    code = "import sys, convmesh.data as d; d.open_source('digits').read(0); print('sklearn' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"False"


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean cosmology"):
        generator("cosmolgy", {})
    with pytest.raises(DataError, match="no setting of digits"):
        open_source("digits:seed=1")
    with pytest.raises(DataError, match="whole number"):
        open_source("cosmology:size=large")
    for samples in (1.5, True, (1,), {"n": 1}):
        with pytest.raises(DataError, match=r"`samples` .* of digits must be a whole number"):
            generator("digits", {"samples": samples})
    with pytest.raises(DataError, match="at least 1"):
        open_source("fractals:size=0")
    with pytest.raises(DataError, match="no more digits"):
        open_source("digits:samples=9999")
