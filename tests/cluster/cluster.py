"""Hosts around a switch, each with one link that can be shaped, cut and mended while processes run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.cluster.host import Host
from tests.cluster.line import Link

_BURST_BYTES, _SECONDS_QUEUED = 32768, 0.4


@cache
def why_not() -> str:
    """Why there can be no hosts here, in a line; nothing if there can."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        return f"needs root and iproute2{' (' + ', '.join(missing) + ')' if missing else ''}"
    try:
        with Cluster(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this kernel makes no hosts: {error}"


class Cluster:
    """`with Cluster(2) as cluster`: hosts h0 at 10.77.0.1, h1 at 10.77.0.2, …

    Plain links are veth pairs. A link that has, or will get, latency or loss is `wired`: a process carries its packets.
    """

    def __init__(self, hosts: int, link: Link | None = None, wired: bool = False) -> None:
        self.hosts: list[Host] = []
        self._wires: list[subprocess.Popen[str] | None] = []
        self._switch = Host("switch")
        link = link or Link()
        try:
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for index in range(hosts):
                self._add(index, wired or not link.is_plain)
                self.shape(index, link)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _add(self, index: int, wired: bool) -> None:
        host = Host(f"h{index}", f"10.77.0.{index + 1}")
        self.hosts.append(host)
        ours, theirs = f"cm{os.getpid() % 10**7}s{index}", f"cm{os.getpid() % 10**7}h{index}"
        self._wires.append(start_wire(ours, theirs) if wired else None)
        if not wired:
            subprocess.run(["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs], check=True)
        subprocess.run(["ip", "link", "set", ours, "netns", str(self._switch.pid), "name", f"to{index}"], check=True)
        subprocess.run(["ip", "link", "set", theirs, "netns", str(host.pid), "name", "eth0"], check=True)
        host.run("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true")  # only what ranks send counts
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.run("ip", "link", "set", device, "up")
        self._switch.run("ip", "link", "set", f"to{index}", "master", "bridge", "up")

    def shape(self, index: int, link: Link) -> None:
        """Give the link of a host other numbers."""
        wire = self._wires[index]
        if wire is not None:
            change(wire, link)
            return
        if not link.is_plain:
            raise ValueError("a plain link has no latency and no loss: make the cluster with wired=True")
        for host, device in ((self._switch, f"to{index}"), (self.hosts[index], "eth0")):
            _limit(host, device, link.megabits_per_second)

    def cut(self, index: int) -> None:
        """Nothing passes, and nobody is told."""
        self._switch.run("ip", "link", "set", f"to{index}", "down")

    def mend(self, index: int) -> None:
        self._switch.run("ip", "link", "set", f"to{index}", "up")

    def crash(self, index: int) -> None:
        """A host ends as by a power cut: no connection is closed."""
        self.cut(index)
        self.hosts[index].kill()

    def bytes_sent(self, index: int) -> int:
        """By a host since it is there, with the headers of packets."""
        seen = json.loads(self.hosts[index].run("ip", "-json", "-stats", "link", "show", "eth0"))
        return int(seen[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self._switch.close()
        for wire in self._wires:
            if wire is not None:
                wire.communicate()


def _limit(host: Host, device: str, megabits_per_second: float) -> None:
    if not megabits_per_second:
        if "tbf" in host.run("tc", "qdisc", "show", "dev", device):
            host.run("tc", "qdisc", "delete", "dev", device, "root")
        return
    host.run(
        "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{megabits_per_second}mbit",
        "burst", str(max(_BURST_BYTES, int(megabits_per_second * 500))), "latency", f"{_SECONDS_QUEUED}s",
    )  # fmt: skip


def start_wire(*given: str) -> subprocess.Popen[str]:
    """A link without numbers yet: a process with these arguments."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.cluster.wire", *given]
    wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert wire.stdout is not None
    if wire.stdout.readline() != "ready\n":
        raise OSError("no TAP devices")
    return wire


def change(wire: subprocess.Popen[str], link: Link) -> None:
    """Give a wire other numbers."""
    assert wire.stdin is not None
    assert wire.stdout is not None
    wire.stdin.write(json.dumps(asdict(link)) + "\n")
    wire.stdin.flush()
    assert wire.stdout.readline() == "changed\n"
