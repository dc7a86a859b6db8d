"""Keeps torch from instructions that a processor announces but a virtual machine withholds."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The newest instructions that oneDNN, which computes torch's convolutions and products on CPUs, may use."""

TILE_LEAF = 0x1D
"""The CPUID leaf with the sizes of AMX's tiles. oneDNN reads it, and the processor refuses tiles of size zero."""


def avoid_hidden_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Keep oneDNN from AMX where a virtual machine hides its tile sizes: a product in bf16 would die of SIGILL."""
    if hides_tiles(described := _first_core(cpuinfo)):
        os.environ.setdefault(ONEDNN_LIMIT, "AVX512_CORE_FP16" if "avx512_fp16" in _flags(described) else "AVX512_CORE")


def hides_tiles(described: dict[str, str]) -> bool:
    """Whether a core, as Linux describes it, has AMX but does not report its tile sizes."""
    return "amx_tile" in _flags(described) and int(described.get("cpuid level", TILE_LEAF)) < TILE_LEAF


def this_core() -> dict[str, str]:
    """The first core as Linux describes it; empty on other systems."""
    return _first_core(Path("/proc/cpuinfo"))


def _first_core(cpuinfo: Path) -> dict[str, str]:
    try:
        with cpuinfo.open() as lines:
            pairs = [line.partition(":") for line in takewhile(str.strip, lines)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in pairs}


def _flags(described: dict[str, str]) -> set[str]:
    return set(described.get("flags", "").split())
