"""A job listens on the network that it was given, and on no other: the addresses of real ranks' sockets."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from convmesh.supervise.following import LAUNCHER, PARTING, STACKS
from convmesh.supervise.pulse import PULSE, SECONDS_CONNECTING, SECONDS_SETTING_UP, Phase, PulseReader
from convmesh.supervise.world import World, free_port

RANK = """
import json, sys
import torch, torch.distributed as dist
import convmesh as cm
from tests.dist.test_job_store import listened_to
cm.init(seconds_timeout=60)
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps([total.item(), sorted(listened_to())]))
dist.barrier()
"""
_LISTEN = "0A"


def listened_to() -> set[str]:
    """The addresses at which this process takes connections."""
    links = [link for path in Path("/proc/self/fd").iterdir() if (link := _link(path)).startswith("socket:")]
    own = {link.removeprefix("socket:[").rstrip("]") for link in links}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/self/net", file).read_text().splitlines()]
    return {_address(row[1]) for row in rows if row[3] == _LISTEN and row[9] in own}


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _address(text: str) -> str:
    """Of /proc/net/tcp: words of 32 bits in hexadecimal, each in the order of this machine."""
    words = text.partition(":")[0]
    packed = b"".join(struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


HALF = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False, timedelta(seconds=60))
print("met", flush=True)
sys.stdin.read()
"""


def test_a_supervisor_knows_that_ranks_have_met_and_only_have_to_connect(tmp_path: Path) -> None:
    """One comes to the store and then connects to nobody: that has a deadline of minutes, not of a long set-up."""
    world, reader = World(2, 2, (0, 1), port=free_port()), PulseReader()
    (tmp_path / "run.toml").write_text('loss = "mse_loss"\nmodel.name = "lenet5"\ndata.source = "digits"\n')
    command = [sys.executable, "-m", "convmesh", "train", str(tmp_path / "run.toml"), "--run", str(tmp_path / "run")]
    seen, given = [], {LAUNCHER: str(os.getpid()), PARTING: "9", STACKS: "2", PULSE: str(reader.file)}
    with subprocess.Popen(
        command,
        env={**world.environment(0), **given},
        pass_fds=[reader.file],
    ) as rank:
        while reader.read().phase is not Phase.JOINING:
            assert rank.poll() is None
        half = subprocess.Popen(
            [sys.executable, "-c", HALF, str(world.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert half.stdout is not None
        seen.append(reader.read())
        assert half.stdout.readline() == "met\n"
        while reader.read() == seen[-1]:
            assert rank.poll() is None
        seen.append(reader.read())
        rank.kill()
        half.communicate()
    reader.close()
    phases = [(each.phase, each.seconds) for each in seen]
    assert phases == [(Phase.JOINING, SECONDS_SETTING_UP), (Phase.CONNECTING, SECONDS_CONNECTING)]


def ranks(**environment: str) -> list[list[object]]:
    """What two ranks say that meet on this machine."""
    world = World(2, 2, (0, 1), port=free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env={**world.environment(rank), **environment},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [json.loads(process.communicate(timeout=120)[0]) for process in started]


def test_local_ranks_take_no_connections_from_elsewhere() -> None:
    assert ranks() == [[2.0, ["127.0.0.1"]]] * 2


def test_a_name_is_left_to_torch() -> None:
    """It may stand for an address here that other hosts cannot reach."""
    (total, first), (_, second) = ranks(MASTER_ADDR="localhost")
    assert total == 2
    assert second == ["127.0.0.1"]
    assert first in (["127.0.0.1", "::"], ["0.0.0.0", "127.0.0.1"])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_meet_at_addresses_of_either_kind(address: str) -> None:
    if not socket.has_ipv6 and ":" in address:
        pytest.skip("no IPv6 here")
    assert ranks(MASTER_ADDR=address)[0][0] == 2
