"""Kernels of one rank's share of a step, beside those of the whole: the mesh's other ranks are imaginary.

python -m benchmarks.gpu_step.share unet3d depth=8 [--whole] [--out FILE.json]

Torch's `fake` backend sends nothing, so NCCL's own kernels are not counted and what arrives has no meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import convmesh as cm
from benchmarks.gpu_step.cases import CASES, DEVICE
from benchmarks.gpu_step.kernels import kernels_of
from convmesh.dist import agreement

STEPS_BEFORE = 4
"""The third step of a compiled network is captured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[*CASES])
    parser.add_argument("mesh", help="such as depth=8 or data=2,height=2")
    parser.add_argument("--samples", type=int, help="of the batch; by default those of the case")
    parser.add_argument("--whole", action="store_true", help="count the whole's kernels too, for the ratio")
    parser.add_argument("--out", type=Path, default=Path("gpu_share.json"))
    options = parser.parse_args()
    axes = {name: int(extent) for name, extent in (part.split("=") for part in options.mesh.split(","))}
    meshes = {"share": axes, **({"whole": dict.fromkeys(axes, 1)} if options.whole else {})}
    found = {name: _apart(options.case, shape, options.samples) for name, shape in meshes.items()}
    options.out.write_text(json.dumps({"case": options.case, "mesh": options.mesh, **found}, indent=1))
    for name, counted in found.items():
        busy = f"{counted['seconds_busy'] * 1e3:.2f} ms"
        print(f"{options.case} {options.mesh} {name}: {counted['kernels']} kernels, {busy}")


def _apart(case: str, axes: dict[str, int], samples: int | None) -> dict[str, Any]:
    """Counted in a process of its own: a process has one world."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_counted, (case, axes, samples))


def _counted(name: str, axes: dict[str, int], samples: int | None) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = cm.Mesh(**axes)
    dist.init_process_group("fake", rank=min(1, mesh.size - 1), world_size=mesh.size, store=FakeStore())
    vars(agreement)["_everyone"] = _as_here  # imaginary ranks cannot be asked
    torch.backends.cudnn.benchmark = True
    case = CASES[name]
    case = dataclasses.replace(case, shape=(samples or case.shape[0], *case.shape[1:]))
    model = case.create(last=True)
    plan = cm.plan(model, case.shape, mesh, "auto", batchnorm="replica")
    opened = dataclasses.replace(cm.open_mesh(mesh, device=DEVICE), stages_through_host=False)
    net = cm.parallelize(model, plan, loss=case.loss(), check_loss=False, compile=True, mesh=opened)
    x, target = case.batch(last=True)
    inputs, targets = net.shard_input(x), net.shard_target(target)

    def step() -> None:
        net.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = net(inputs, targets)
        loss.backward()

    for _ in range(STEPS_BEFORE):
        step()
    return {**kernels_of(step), "bytes_peak": torch.cuda.max_memory_allocated()}


def _as_here(group: Any, world_ranks: Any, report: Any) -> dict[int, Any]:
    del group
    return dict.fromkeys(world_ranks, report)


if __name__ == "__main__":
    main()
