"""A run on a GPU: batches are read into pinned memory and copied while the host goes on, and steps can be profiled."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import convmesh as cm
from convmesh.cli.main import main
from convmesh.profiling.profile_folder import load_run
from convmesh.testing import RankError, run_ranks
from convmesh.train.shared_fate import shared_fate
from tests.gpu.conftest import nccl_takes_several
from tests.train.runs import losses, ran

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

CYCLES = 400_000_000
"""About two tenths of a second of a GPU that waits."""
SECONDS_TIMEOUT = 110


def loaded() -> tuple[bool, bool, float, float]:
    """Whether a batch was read into pinned memory and arrives as it was, the seconds for which its copies to a busy GPU
    held up the host, and those until they were there."""
    images, classes = torch.randn(16, 1, 512, 512), torch.arange(16)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 16))
    mesh, plan = cm.open_mesh(cm.Mesh(), device="cuda"), cm.plan(model, (16, 1, 512, 512), cm.Mesh(), "data")
    net = cm.parallelize(model, plan, F.cross_entropy, mesh=mesh)
    source = cm.data.open_source(TensorDataset(images, classes))
    loader = cm.data.Loader(source, net, cm.data.Order.evaluation(16, 16))
    with ThreadPoolExecutor(2) as threads:
        batch = loader._asked(0, 0, threads, threads)
    is_pinned = all(tensor.is_pinned() for tensor, _, _ in batch.tensors)
    batch.on(mesh.device)  # claims the memory of the GPU, which the host waits for
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    begin = time.perf_counter()
    x, target = batch.on(mesh.device)
    seconds_host = time.perf_counter() - begin
    torch.cuda.synchronize()
    seconds_all = time.perf_counter() - begin
    is_same = torch.equal(x.cpu(), images) and torch.equal(target.cpu(), classes)
    return is_pinned, is_same, seconds_host, seconds_all


def test_batches_are_pinned_and_the_host_does_not_wait_for_their_copies() -> None:
    ((is_pinned, is_same, seconds_host, seconds_all),) = run_ranks(1, loaded, seconds_timeout=SECONDS_TIMEOUT)
    assert is_pinned
    assert is_same
    assert seconds_all > 0.05  # the GPU was busy
    assert seconds_host < 0.2 * seconds_all


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_gpu_is_profiled(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if ranks > 1 and not nccl_takes_several():
        pytest.skip("NCCL needs a GPU for each rank, or 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    plan = {"strategy": "spatial", "predict": True, "system": "dgx-a100"}
    for folder, steps in (("profiled", 4), ("bare", 0)):
        tables = {"profile_steps": steps, "plan": plan}
        run_ranks(ranks, ran, tables, str(tmp_path / folder), backend="nccl", seconds_timeout=SECONDS_TIMEOUT)
    profiled = tmp_path / "profiled"
    assert losses(profiled) == pytest.approx(losses(tmp_path / "bare"), rel=1e-9)
    check_parts(profiled, ranks)
    assert main(["profile", str(profiled)]) == 0
    page = capsys.readouterr().out
    assert all(word in page for word in ("exposed", "predicted", "0 forward", "ui.perfetto.dev"))
    assert (profiled / "profile" / "trace.json").exists()


def check_parts(folder: Path, ranks: int) -> None:
    """By the clock of the device, every layer is timed in both directions, and the parts make up the step."""
    run = load_run(folder).run
    assert [step.steps[0].step for step in run.steps] == [4, 5, 6, 7]  # after three that warm up
    cells = set(run.layers(0))
    assert {("0", "forward"), ("0", "backward"), ("", "update")} <= cells
    for step in run.steps:
        for rank in range(ranks):
            times = step.times(rank)
            assert times.compute + times.exposed + times.idle + times.data + times.other == pytest.approx(times.step)
            assert times.compute > 0


def fails_alone() -> None:
    """The first rank meets an error between two sums; the other one waits for it in the second."""
    number = torch.zeros(1, device="cuda")
    with shared_fate():
        torch.distributed.all_reduce(number)
        if torch.distributed.get_rank() == 0:
            raise MemoryError("not enough of it")
        torch.distributed.all_reduce(number)
        number.item()


def test_a_rank_that_fails_alone_says_why_and_ends() -> None:
    if not nccl_takes_several():
        pytest.skip("NCCL needs a GPU for each rank, or 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    with pytest.raises(RankError, match=r"rank 0 of 2 failed:(.|\n)*MemoryError: not enough of it"):
        run_ranks(2, fails_alone, backend="nccl", seconds_timeout=60)
