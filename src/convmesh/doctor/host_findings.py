"""Cores, memory, GPUs, links between processes, disk and counters."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed as dist

from convmesh.doctor.finding import Finding
from convmesh.measure.energy_counters import POWERCAP, energy_meter
from convmesh.measure.machine import this_machine
from convmesh.processor import ONEDNN_LIMIT, hides_tiles, this_core

LEAST_FILES = 1024
"""File descriptors of a rank: connections to the ranks of its groups, and files of samples."""

LEAST_BYTES_SHARED = 1 << 30
"""NCCL and Gloo pass messages between the ranks of one host through /dev/shm."""

HIDDEN_TILES = (
    f"this virtual machine announces AMX but not its tiles; torch is kept from it ({ONEDNN_LIMIT})",
    "Ask for a CPU template that passes CPUID leaf 0x1D on: products in bf16 are faster with AMX.",
)


def hardware() -> Iterator[Finding]:
    """What ranks run on."""
    machine = this_machine()
    kind, memory = "host" if machine.gpus else machine.kind, f"{machine.bytes_host / 2**30:.0f} GiB of memory"
    yield Finding("processor", "ok", f"{machine.cores} cores ({kind}), {memory}")
    if hides_tiles(this_core()):
        yield Finding("AMX", "missing", *HIDDEN_TILES)
    yield _gpus()
    yield _backends()
    yield _shared_memory()
    yield _open_files()
    yield _energy()


def _gpus() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("GPUs", "ok", f"{len(names)} × {names[0]}, CUDA {torch.version.cuda}")
    if Path("/dev/nvidiactl").exists():
        advice = "Install a CUDA build of torch that the driver supports (`nvidia-smi` shows its CUDA version)."
        return Finding("GPUs", "broken", f"the driver is there, but torch {torch.__version__} sees no GPU", advice)
    return Finding("GPUs", "missing", "none; ranks run on the processor's cores")


def _backends() -> Finding:
    available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    names = [name for name in available if available[name]]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    if wanted in names:
        return Finding("messages", "ok", f"{' and '.join(names)}; ranks use {wanted}")
    text = f"torch has {' and '.join(names) or 'no back-end'}, but ranks here need {wanted}"
    return Finding("messages", "broken", text, f"Install a build of torch with {wanted}.")


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        size = 0
    text = f"{size / 2**30:.1f} GiB in /dev/shm"
    if size >= LEAST_BYTES_SHARED:
        return Finding("shared memory", "ok", text)
    advice = "In a container, start it with --shm-size=8g or --ipc=host."
    return Finding("shared memory", "missing", f"{text}, too little for NCCL between many ranks", advice)


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= LEAST_FILES:
        return Finding("open files", "ok", f"at most {limit} a process")
    advice = f"Raise it: `ulimit -n {LEAST_FILES}`, or LimitNOFILE in the service that starts jobs."
    return Finding("open files", "missing", f"at most {limit} a process; many ranks need more", advice)


def _energy() -> Finding:
    counters = [counter.name for counter in energy_meter().counters]
    if counters:
        return Finding("energy", "ok", f"counters of {', '.join(counters)}")
    readable = "Processors' counters are often for root: chmod a+r /sys/class/powercap/*/energy_uj."
    advice = readable if any(POWERCAP.glob("*/energy_uj")) else ""
    return Finding("energy", "missing", "no counter can be read; runs have no joules", advice)
