"""A loader yields what cutting the global batch would, and reads nothing else."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import convmesh as cm
from convmesh.data import Augment, Loader, Order, SampleStore, generator, open_source
from convmesh.data.converting import convert
from convmesh.data.making import make
from convmesh.errors import DataError, DataWarning
from tests.conftest import Pools
from tests.data.volumes import SAMPLES, SHAPE, classifier, segmenter, volumes, voxel_labels, write_hdf5

MESHES = [
    (cm.Mesh(data=4), "data"),
    (cm.Mesh(depth=2, height=2), "spatial"),
    (cm.Mesh(data=2, width=2), "data+spatial"),
    (cm.Mesh(data=2, filter=2), "data+filter"),
]
AUGMENT = Augment(seed=3, flip="DHW", rotate90=("DH",), crop=(10, 10, 7), intensity=0.2, shift=0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hdf5(tmp_path_factory.mktemp("data") / "volumes.h5", volumes(), voxel_labels()))


def global_batch(path: str, indices: tuple[int, ...], epoch: int, augment: Augment | None) -> list[torch.Tensor]:
    source = open_source(path)
    inputs, targets = [source.read(i) for i in indices], [source.read_target(i) for i in indices]
    if augment is not None:
        turns = [augment.of(epoch, index, SHAPE[1:]) for index in indices]
        inputs = [t.relit(t.moved(x[(slice(None), *t.window.slices())])) for t, x in zip(turns, inputs, strict=True)]
        targets = [t.moved(y[t.window.slices()]) for t, y in zip(turns, targets, strict=True)]
    return [torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets)).long()]


def compare(path: str, mesh: cm.Mesh, strategy: str, augment: Augment | None, bytes_store: int | None) -> None:
    source = open_source(path)
    shape = source.input.shape if augment is None else augment.shape(source.input.shape)
    net = segmenter(shape, 4, mesh, strategy)
    order = Order(5, SAMPLES, 4, keep_last=True)
    store = None if bytes_store is None else SampleStore(bytes_store)
    loader = Loader(source, net, order, augment, store=store, prefetch=1)
    for epoch in range(3):
        seen = 0
        for number, (x, target) in enumerate(loader.epoch(epoch, start=epoch % 2), epoch % 2):
            whole, labels = global_batch(path, order.batch(epoch, number), epoch, augment)
            assert torch.equal(x, net.shard_input(whole))
            assert torch.equal(target, net.shard_target(labels))
            net(x, target).backward()
            seen += 1
        assert seen == order.batches - epoch % 2
    if store is not None:
        assert store.bytes_held <= store.bytes_limit


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize("augment", [None, AUGMENT])
def test_shards_are_those_of_the_global_batch(
    mesh: cm.Mesh, strategy: str, augment: Augment | None, path: str, pools: Pools
) -> None:
    pools[4].run(compare, path, mesh, strategy, augment, None)


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize(("augment", "bytes_store"), [(None, 10**9), (AUGMENT, 10**9), (AUGMENT, 20_000)])
def test_samples_from_memory_are_those_from_disk(
    mesh: cm.Mesh, strategy: str, augment: Augment | None, bytes_store: int, path: str, pools: Pools
) -> None:
    pools[4].run(compare, path, mesh, strategy, augment, bytes_store)


def class_shards(path: str, mesh: cm.Mesh, strategy: str) -> None:
    source = open_source(path)
    net = classifier(source.input.shape, 4, mesh, strategy)
    order = Order.evaluation(SAMPLES, 4)
    for number, (x, target) in enumerate(Loader(source, net, order, dtype=torch.float64).epoch(0)):
        indices = order.batch(0, number)
        assert torch.equal(x, net.shard_input(torch.from_numpy(volumes()[list(indices)]).double()))
        assert torch.equal(target, net.shard_target(torch.tensor(indices) % 3))
        assert target.dtype == torch.int64


@pytest.mark.parametrize(("mesh", "strategy"), [MESHES[0], MESHES[2]])
def test_classes_are_cut_where_samples_are(mesh: cm.Mesh, strategy: str, tmp_path: Path, pools: Pools) -> None:
    path = write_hdf5(tmp_path / "classes.h5", volumes(), np.arange(SAMPLES, dtype=np.uint8) % 3)
    pools[4].run(class_shards, str(path), mesh, strategy)


def bytes_of_an_epoch(path: str) -> tuple[int, float]:
    source = open_source(path)
    net = segmenter(source.input.shape, 2, cm.Mesh(depth=2, height=2), "spatial")
    loader = Loader(source, net, Order(0, len(source), 2))
    for x, target in loader.epoch(0):
        assert net(x, target).isfinite()
    assert loader.seconds_waiting > 0
    return loader.bytes_read, source.counters.amplification


@pytest.mark.parametrize("suffix", [".h5", ".zarr", ".npy"])
def test_a_rank_of_four_reads_a_quarter(suffix: str, tmp_path: Path, pools: Pools) -> None:
    made = generator("fractals", {"size": 32, "samples": 4})
    make(made, tmp_path / f"set{suffix}", processes=1)
    whole = made.samples * (made.input.bytes_sample + made.target.bytes_sample)
    for read, amplification in pools[4].run(bytes_of_an_epoch, str(tmp_path / f"set{suffix}")):
        assert read <= 1.05 * whole / 4
        assert amplification <= 1.05


def warned_of(path: str, mesh: cm.Mesh, strategy: str) -> list[str]:
    source = open_source(path)
    net = segmenter(source.input.shape, 2, mesh, strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Loader(source, net, Order(0, len(source), 2))
    return [str(each.message) for each in caught if each.category is DataWarning]


def test_chunks_that_the_plan_cuts_through_are_warned_of_once_with_the_cost(tmp_path: Path, pools: Pools) -> None:
    """Chunks of half a depth serve two ranks along depth; four of them, or two along height, read twice their part."""
    path = str(write_hdf5(tmp_path / "a.h5", volumes(), voxel_labels(), chunks=(1, 2, 6, 10, 9), compression="gzip"))
    assert pools[2].run(warned_of, path, cm.Mesh(depth=2), "spatial") == [[], []]
    assert pools[2].run(warned_of, path, cm.Mesh(data=2), "data") == [[], []]
    for mesh in (cm.Mesh(depth=4), cm.Mesh(depth=2, height=2)):
        first, *others = pools[4].run(warned_of, path, mesh, "spatial")
        assert others == [[], [], []]
        assert len(first) == 1
        assert "ranks read 2.0 times the bytes they need, 0.0173 instead of 0.00864 MB a sample" in first[0]
        assert f"convmesh data convert {path} NEW.h5" in first[0]
    convert(Path(path), tmp_path / "new.h5")
    assert pools[4].run(warned_of, str(tmp_path / "new.h5"), cm.Mesh(depth=2, height=2), "spatial") == [[]] * 4


def test_gzipped_volumes_are_warned_of_and_the_advice_keeps_their_labels(tmp_path: Path, pools: Pools) -> None:
    nibabel = pytest.importorskip("nibabel")
    for name in ("inputs", "targets"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for index in range(2):
            image = nibabel.Nifti1Image(np.zeros((8, 8, 8), np.float32 if name == "inputs" else np.int16), np.eye(4))
            nibabel.save(image, tmp_path / "scans" / name / f"{index}.nii.gz")
    inputs, targets = pools[1].run(warned_of, str(tmp_path / "scans"), cm.Mesh(), "data")[0]
    assert "0.nii.gz is gzipped" in inputs
    assert "targets" in targets
    assert f"`convmesh data convert {tmp_path / 'scans'} NEW.h5`" in inputs


def refused(path: str) -> tuple[int, str]:
    source = open_source(path)
    net = segmenter(source.input.shape, 2, cm.Mesh(depth=2, data=2), "data+spatial")
    steps = 0
    try:
        for x, target in Loader(source, net, Order(0, 8, 2, shuffle=False)).epoch(0):
            net(x, target).backward()
            steps += 1
    except DataError as error:
        return steps, str(error)
    return steps, "no error"


def test_one_ranks_broken_sample_is_every_ranks_error(tmp_path: Path, pools: Pools) -> None:
    broken = volumes(8)
    broken[5, 0, 0, 0, 0] = np.inf
    path = write_hdf5(tmp_path / "broken.h5", broken, voxel_labels(8))
    for steps, message in pools[4].run(refused, str(path)):
        assert steps == 2
        assert "sample 5" in message


def test_what_does_not_fit_the_plan_is_refused(tmp_path: Path, pools: Pools) -> None:
    path = write_hdf5(tmp_path / "a.h5", volumes(), voxel_labels())
    for message in pools[1].run(misfit, str(path)):
        assert message == [True, True, True]


def misfit(path: str) -> list[bool]:
    source, net = open_source(path), segmenter((2, 12, 10, 8), 2, cm.Mesh(), "data")
    told = []
    for order, threads in ((Order(0, 8, 2), 2), (Order(0, 12, 2), 2), (Order(0, 8, 2), 0)):
        try:
            Loader(source, net, order, threads=threads)
        except DataError:
            told.append(True)
    return told


def bytes_with_a_store(path: str) -> tuple[list[int], int]:
    source = open_source(path)
    net = segmenter(source.input.shape, 4, cm.Mesh(data=4), "data")
    store = SampleStore(10**9)
    loader = Loader(source, net, Order(1, 8, 4), store=store)
    read = []
    for epoch in range(3):
        for x, target in loader.epoch(epoch):
            net(x, target)
        read.append(loader.bytes_read)
    return read, store.bytes_held


def test_later_epochs_read_nothing_from_disk(path: str, pools: Pools) -> None:
    for read, held in pools[4].run(bytes_with_a_store, path):
        assert read[0] == read[1] == read[2] == held
