"""Order and augmentation are functions of seed, epoch and index, and augmented boxes are boxes of the augmented."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.data import Augment, Order
from convmesh.errors import DataError
from convmesh.layout import Box, Span

CUBE = (8, 8, 8)


@given(st.integers(0, 2**40), st.integers(0, 9), st.integers(1, 50), st.integers(1, 9))
def test_an_epoch_has_every_sample_once(seed: int, epoch: int, samples: int, batch: int) -> None:
    order = Order(seed, samples, batch, keep_last=True)
    seen = [index for number in range(order.batches) for index in order.batch(epoch, number)]
    assert sorted(seen) == list(range(samples))
    assert order.batch(epoch, 0) == Order(seed, samples, batch, keep_last=True).batch(epoch, 0)


def test_training_drops_a_part_of_a_batch() -> None:
    assert (Order(0, 11, 4).batches, Order.evaluation(11, 4).batches) == (2, 3)
    assert Order.evaluation(11, 4).batch(7, 2) == (8, 9, 10)


def test_epochs_and_seeds_differ() -> None:
    firsts = {Order(seed, 1000, 10).batch(epoch, 0) for seed in range(3) for epoch in range(3)}
    assert len(firsts) == 9


def test_the_order_does_not_change_with_versions() -> None:
    assert Order(7, 20, 5).batch(3, 1) == (10, 6, 3, 14, 7)


def test_bad_orders_are_refused() -> None:
    with pytest.raises(DataError, match="at least one batch of 8"):
        Order(0, 4, 8)
    with pytest.raises(DataError, match="2 batches"):
        Order(0, 8, 4).batch(0, 2)


augments = st.builds(
    Augment,
    seed=st.integers(0, 5),
    flip=st.sampled_from(["", "D", "HW", "DHW"]),
    rotate90=st.sampled_from([(), ("HW",), ("DH", "DW"), ("HW", "DH", "DW")]),
    crop=st.sampled_from([None, (5, 5, 5), (8, 8, 8)]),
    intensity=st.sampled_from([0.0, 0.3]),
    shift=st.sampled_from([0.0, 0.5]),
)
pairs = st.tuples(st.integers(0, 8), st.integers(0, 8))


@settings(max_examples=60)
@given(augments, st.integers(0, 3), st.integers(0, 99), st.tuples(pairs, pairs, pairs))
def test_a_box_of_the_augmented_is_the_augmented_box(
    augment: Augment, epoch: int, index: int, drawn: tuple[tuple[int, int], ...]
) -> None:
    sample = np.random.default_rng(0).standard_normal((2, *CUBE)).astype(np.float32)
    transform = augment.of(epoch, index, CUBE)
    whole = transform.relit(transform.moved(sample[(slice(None), *transform.window.slices())]))
    assert whole.shape == augment.shape((2, *CUBE))
    spans = [Span(*sorted((min(a, n), min(b, n)))) for (a, b), n in zip(drawn, transform.shape, strict=True)]
    box = Box((Span(0, 2), *spans))
    read = sample[transform.source_box(box).slices()]
    assert np.array_equal(transform.relit(transform.moved(read)), whole[box.slices()])


def test_turns_are_those_of_numpy() -> None:
    sample = np.arange(64.0).reshape(4, 4, 4)
    turns = {np.rot90(sample, k, (1, 2)).tobytes() for k in range(4)}
    made = {Augment(rotate90=("HW",)).of(0, index, (4, 4, 4)).moved(sample).tobytes() for index in range(40)}
    assert made == turns


def test_bad_augmentations_are_refused() -> None:
    with pytest.raises(DataError, match="letters of DHW"):
        Augment(flip="X")
    with pytest.raises(DataError, match="equal extents in DH"):
        Augment(rotate90=("DH",)).of(0, 0, (4, 6, 6))
    with pytest.raises(DataError, match="2 dims of space"):
        Augment(flip="D").of(0, 1, (4, 6))
    with pytest.raises(DataError, match="fit in it"):
        Augment(crop=(9, 8, 8)).shape((1, *CUBE))
