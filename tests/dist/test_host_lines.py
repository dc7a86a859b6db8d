"""Small messages between ranks of one host: over sockets of their own, exactly as the backend would carry them."""

import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import convmesh as cm
from convmesh.dist import Reduction
from convmesh.dist.host_lines import BYTES_MOST, HostLine, LineSum, send_on_while
from convmesh.dist.open_mesh import OpenMesh
from convmesh.dist.opening_lines import VARIABLE, open_lines
from convmesh.errors import LostRankError
from convmesh.testing import opened, run_ranks
from tests.conftest import Pools

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="lines are sockets of Linux")

SECONDS = 60
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]


Ends = tuple[HostLine, HostLine]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a line, in one process; they wait for 50 ms."""
    here, there = (HostLine(end, 0.05) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("dtype", [*TYPES, torch.bool, torch.complex64], ids=str)
def test_messages_of_any_type_and_size_arrive_in_their_order(dtype: torch.dtype, ends: Ends) -> None:
    here, there = ends
    sent = [torch.randint(0, 2, (count,)).to(dtype) for count in (1, 0, 3000, 7)]
    for values in sent:
        here.send("rows", values)
    buffers = [torch.empty_like(values) for values in sent]
    arriving = [there.receive("rows", buffer) for buffer in buffers]
    arriving[-1].wait()
    assert all(each.is_completed() for each in arriving), "what came before has been read, too"
    assert all(torch.equal(buffer, values) for buffer, values in zip(buffers, sent, strict=True))


def received_in(line: HostLine, count: int, elements: int) -> list[torch.Tensor]:
    buffers = [torch.empty(elements) for _ in range(count)]
    for passage in [line.receive("rows", buffer) for buffer in buffers]:
        passage.wait()
    return buffers


def more_than_buffers_hold() -> list[float]:
    """Both ranks post all they send before either reads; then wait for a sum that Gloo carries, and read at last."""
    mesh = opened(cm.Mesh(height=2))
    line = mesh.line(1 - mesh.rank, 1)
    assert line is not None
    count, elements = 100, 1 << 16  # 25 MiB, several times what a socket keeps
    leaving = [line.send("rows", torch.full((elements,), float(number))) for number in range(count)]
    assert not leaving[-1].is_completed()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    send_on_while(work)
    work.wait()
    found = received_in(line, count, elements)
    for each in leaving:
        each.wait()
    return [float(values.unique().item()) for values in found]


def test_what_buffers_do_not_hold_is_sent_while_ranks_wait(pools: Pools) -> None:
    assert pools[2].run(more_than_buffers_hold) == [[float(number) for number in range(100)]] * 2


def sums(dtype: torch.dtype) -> list[bool]:
    """By line and by Gloo, of small, large and special values."""
    mesh = opened(cm.Mesh(height=2))
    torch.manual_seed(mesh.rank)
    values = (torch.randn(3000) * 10 ** torch.randint(-3, 4, (3000,))).to(dtype)
    by_backend = values.clone()
    dist.all_reduce(by_backend)
    line = mesh.line(1 - mesh.rank, values.nbytes)
    assert line is not None
    by_line = values.clone()
    LineSum(line, "sum", by_line).wait()
    (in_a_layer,) = Reduction([values], mesh, ("height",)).wait()
    return [torch.equal(by_line, by_backend), torch.equal(in_a_layer, by_backend)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_are_those_of_the_backend_to_the_last_bit(dtype: torch.dtype, pools: Pools) -> None:
    assert pools[2].run(sums, dtype) == [[True, True]] * 2


def who_carries(bytes_message: int) -> list[bool]:
    mesh = opened(cm.Mesh(height=3))
    return [mesh.line(rank, bytes_message) is not None for rank in range(3)]


def test_ranks_of_a_host_have_lines_to_all_others_for_small_messages(pools: Pools) -> None:
    assert pools[3].run(who_carries, BYTES_MOST) == [[False, True, True], [True, False, True], [True, True, False]]
    assert pools[3].run(who_carries, BYTES_MOST + 1) == [[False] * 3] * 3


def without_lines(refusing: list[int]) -> tuple[list[bool], float]:
    """Where some ranks are told to leave messages to Gloo."""
    if dist.get_rank() in refusing:
        os.environ[VARIABLE] = "0"
    mesh = cm.open_mesh(cm.Mesh(height=3))
    x: Any = cm.shard(torch.ones(1, 1, 12, 4), mesh, {2: "height"})
    y = torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)
    return [mesh.line(rank, 1) is not None for rank in range(3)], float(y.sum())


@pytest.mark.parametrize("refusing", [[0], [2], [0, 1, 2]], ids=str)
def test_a_rank_without_lines_is_reached_by_the_backend(refusing: list[int]) -> None:
    found = run_ranks(3, without_lines, refusing)
    expected = [[a != b and not {a, b} & {*refusing} for b in range(3)] for a in range(3)]
    assert [lines for lines, _ in found] == expected
    assert {total for _, total in found} == {float(34 * 10)}


def opened_again() -> tuple[int, int]:
    """Descriptors of this process before and after its lines are asked for many times more."""
    opened(cm.Mesh(height=2))
    assert dist.group.WORLD is not None
    before = len([*Path("/proc/self/fd").iterdir()])
    lines = [open_lines(dist.group.WORLD, (0, 1), SECONDS) for _ in range(20)]
    assert all(each == lines[0] for each in lines)
    return before, len([*Path("/proc/self/fd").iterdir()])


def test_lines_are_opened_once(pools: Pools) -> None:
    for before, after in pools[2].run(opened_again):
        assert before == after


def halo(mesh: OpenMesh) -> None:
    x: Any = cm.shard(torch.zeros(1, 1, 8, 8), mesh, {2: "height"})
    torch.nn.functional.conv2d(x, torch.zeros(1, 1, 3, 3), padding=1)


def small_sum(mesh: OpenMesh) -> None:
    Reduction([torch.ones(3)], mesh, ("height",)).wait()


def left_behind(rank: int, folder: Path, doing: Callable[[OpenMesh], None]) -> None:
    """Rank 1 has a process of its own, as loaders are, which lives on when it is killed."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = cm.open_mesh(cm.Mesh(height=2))
    doing(mesh)
    if rank == 1:
        loader = os.fork()
        if not loader:
            signal.pause()
        (folder / "loader").write_text(str(loader), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError) as caught:
        doing(mesh)
    (folder / "told").write_text(str(caught.value), encoding="utf-8")


@pytest.mark.parametrize("doing", [halo, small_sum])
def test_a_killed_rank_is_told_at_once_and_leaves_nothing(doing: Callable[[OpenMesh], None], tmp_path: Path) -> None:
    before = {*Path("/dev/shm").iterdir()}
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=left_behind, args=(rank, tmp_path, doing)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    os.kill(int((tmp_path / "loader").read_text(encoding="utf-8")), signal.SIGKILL)
    told = (tmp_path / "told").read_text(encoding="utf-8")
    assert re.search(r"lost a rank that it waited for in .*\(convmesh/.*(closed the connection|reset|pipe)", told, re.I)
    assert {each for each in Path("/dev/shm").iterdir() if each.name.startswith("convmesh")} <= before


def test_a_rank_that_says_nothing_is_waited_for_until_the_time_is_up(ends: Ends) -> None:
    with pytest.raises(RuntimeError, match=re.escape("timed out after 0.05 s")):
        ends[0].receive("rows", torch.empty(3)).wait()


@pytest.mark.parametrize(("what", "count"), [("sum", 3), ("rows", 4)])
def test_another_message_than_the_expected_one_is_an_error(what: str, count: int, ends: Ends) -> None:
    here, there = ends
    here.send(what, torch.ones(count))
    with pytest.raises(RuntimeError, match="another message than this rank waits for"):
        there.receive("rows", torch.empty(3)).wait()


def a_stranger_calls(greeting: bytes) -> list[bool]:
    """While ranks listen, somebody without their secret connects, and is turned away."""
    real = socket.socket.listen
    strangers: list[socket.socket] = []

    def listen(self: socket.socket, backlog: int) -> None:
        real(self, backlog + 1)
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        strangers[-1].connect(self.getsockname())
        strangers[-1].sendall(greeting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", listen)
        mesh = cm.open_mesh(cm.Mesh(height=2))
    small_sum(mesh)
    for stranger in strangers:
        stranger.close()
    return [mesh.line(rank, 1) is not None for rank in range(2)]


@pytest.mark.parametrize("greeting", [(1).to_bytes(8, "little") + bytes(16), b"hello", b""], ids=str)
def test_who_does_not_know_the_secret_is_turned_away(greeting: bytes) -> None:
    assert run_ranks(2, a_stranger_calls, greeting) == [[False, True], [True, False]]
