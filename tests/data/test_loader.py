"""A loader yields what cutting the global batch would, and reads nothing else."""

import numpy as np
import pytest
import torch

import convmesh as cm
from convmesh.data import Augment, Loader, Order, SampleStore, open_source
from tests.conftest import Pools
from tests.data.volumes import SAMPLES, SHAPE, segmenter, volumes, voxel_labels, write_hdf5

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
    loader = Loader(source, net, order, augment, store=store)
    for epoch in range(3):
        for number, (x, target) in enumerate(loader.epoch(epoch, start=epoch % 2), epoch % 2):
            whole, labels = global_batch(path, order.batch(epoch, number), epoch, augment)
            assert torch.equal(x, net.shard_input(whole))
            assert torch.equal(target, net.shard_target(labels))
            net(x, target).backward()
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
