"""Two hosts joined by one wire whose bandwidth and latency are kept exactly."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

from tests.cluster.cluster import change, start_wire
from tests.cluster.host import Host
from tests.cluster.line import Link

_PRIORITY = 10
_CONGESTION = "cubic"


class Pair:
    """`with Pair(link) as pair`: hosts h0 at 10.77.0.1 and h1 at 10.77.0.2, with no switch between them.

    The wire's process goes before all others, or packets would wait for a core besides the link. Senders use Linux's
    own default way to avoid congestion, whatever this machine's is.
    """

    def __init__(self, link: Link) -> None:
        self.hosts = (Host("h0", "10.77.0.1"), Host("h1", "10.77.0.2"))
        self._wire: subprocess.Popen[str] | None = None
        try:
            self._join(link)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _join(self, link: Link) -> None:
        ends = [f"cm{os.getpid() % 10**7}p{index}" for index in range(len(self.hosts))]
        self._wire = start_wire(*ends, "--whole")
        os.sched_setscheduler(self._wire.pid, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        change(self._wire, link)
        for host, end in zip(self.hosts, ends, strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", str(host.pid), "name", "eth0"], check=True)
            host.run("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                host.run("ip", "link", "set", device, "up")
            host.run(
                "ip", "route", "replace", "10.77.0.0/24", "dev", "eth0", "src", host.address, "congctl", _CONGESTION
            )

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        if self._wire is not None:
            self._wire.communicate()
