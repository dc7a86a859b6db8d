"""Describes this machine: its CPU or GPUs, cores and memory."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

LEAST_RANKS = 16
"""Ranks that every host accepts, even if it has fewer cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host. A rank drives a GPU if there is one, else one thread of the CPU."""

    kind: str
    cores: int
    gpus: int
    bytes_host: int
    processors: int
    """Multiprocessors of a GPU; 1, the thread, on a CPU."""
    bytes_device: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.gpus else "cpu")

    @property
    def places(self) -> int:
        """Ranks that may be placed on the host: one per GPU; on a CPU at least `LEAST_RANKS`."""
        return self.gpus or max(LEAST_RANKS, self.cores)

    @property
    def slug(self) -> str:
        """The device's name for use in file names."""
        words = "".join(letter if letter.isalnum() else " " for letter in self.kind.lower()).split()
        return "-".join(words)


def this_machine() -> Machine:
    """This machine, as the OS and the driver describe it."""
    cores, memory = len(os.sched_getaffinity(0)), _bytes_host()
    if not torch.cuda.is_available():
        share = memory // cores
        return Machine(kind=_processor(), cores=cores, gpus=0, bytes_host=memory, processors=1, bytes_device=share)
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        kind=properties.name,
        cores=cores,
        gpus=torch.cuda.device_count(),
        bytes_host=memory,
        processors=properties.multi_processor_count,
        bytes_device=properties.total_memory,
    )


def _processor() -> str:
    """The CPU's name in /proc/cpuinfo, such as `AMD EPYC 7763`; virtual machines often hide the rest."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _bytes_host() -> int:
    """The memory that this process may use: the host's, or the control group's limit if lower."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or no limit, written as "max"
        return whole
    return min(whole, limit)
