"""One rival in a process of its own. It answers commands on its input, a line of JSON each: a failure stays here.

prepare  make the model, and compile where that is asked for; without cuDNN's benchmark: other processes are at work
ready    run in the measured setting, capture where the rival is a graph; peak memory
time     seconds of a step, over one block
energy   joules of a step, where the GPU tells
profile  kernels of a step
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.remote_worker import answer_commands

SECONDS_BLOCK = 0.12
SECONDS_ENERGY = 1.0
"""The GPU counts its energy every 20 to 100 ms."""
STEPS_BEFORE = 2
"""Steps that ConvMesh runs before it captures one."""


class Worker:
    """A rival of a case, from its start to its numbers."""

    def __init__(self, case: str, name: str) -> None:
        import torch

        import convmesh as cm
        from benchmarks.gpu_step.cases import CASES
        from benchmarks.gpu_step.rivals import RIVALS
        from benchmarks.gpu_step.trainings import Training

        self.torch, self.words = torch, (case, name)
        self.case, self.rival = CASES[case], RIVALS[name]
        self.training: Training | None = None
        self.step: Any = None
        self.count = 1
        self._begin = cm.init

    def _make(self) -> None:
        if self.training is None:
            self._begin()
            self.training = self.rival.make(self.case)
            self.step = self.training.step

    def _measured(self, measured: bool) -> None:
        """cuDNN keeps its plans by the shape and by this flag, which bf16 does not use: none is carried over."""
        self.torch.backends.cudnn.benchmark = measured
        self.torch.backends.cudnn.allow_tf32 = measured

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        if self.rival.twin:
            words = [sys.executable, "-m", "benchmarks.gpu_step.worker", *self.words, "warm"]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        self._measured(False)
        self._make()
        if self.rival.compiles and not self.rival.twin:
            self._run(1)
            self._keep_gradients()
            self._run(1)
        self.torch.cuda.empty_cache()
        return {"seconds_prepare": time.perf_counter() - begin}

    def _keep_gradients(self) -> None:
        """Those of the first step, for a comparison, where a folder is named."""
        if "GPU_STEP_GRADIENTS" in os.environ and self.training is not None:
            grads = [p.grad.cpu() for p in self.training.parameters if p.grad is not None]
            self.torch.save(grads, f"{os.environ['GPU_STEP_GRADIENTS']}/{' - '.join(self.words)}.pt")

    def warm(self) -> None:
        self._make()
        self._run(2)

    def ready(self) -> dict[str, Any]:
        from benchmarks.gpu_step.trainings import captured

        begin, cuda = time.perf_counter(), self.torch.cuda
        self._measured(True)
        self._make()
        self._run(STEPS_BEFORE if self.rival.captures else 3)
        cuda.reset_peak_memory_stats()
        if self.rival.is_graph:
            self.step = captured(self.step)
            peak = cuda.max_memory_allocated()
            loss = self._run(1)
        else:
            loss = self._run(2)  # of a step that captures itself: the capture, whose memory later steps use again
            peak = cuda.max_memory_allocated()
        self.count = max(2, min(40, int(SECONDS_BLOCK / self._timed(2))))
        return {
            "seconds_ready": time.perf_counter() - begin,
            # torch.compile's CUDA graphs own their memory: torch does not count it as allocated
            "bytes_peak": None if self.rival.twin else peak,
            "loss": loss,
            "count": self.count,
        }

    def _once(self) -> Any:
        assert self.training is not None
        self.training.before()
        return self.step()

    def _run(self, count: int) -> float:
        for _ in range(count):
            loss = self._once()
        self.torch.cuda.synchronize()
        return float(loss.item())

    def _timed(self, count: int) -> float:
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._once()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    def time(self) -> dict[str, Any]:
        self._once()
        return {"seconds": self._timed(self.count)}

    def energy(self) -> dict[str, Any]:
        from convmesh.measure.energy_counters import EnergyMeter, gpu_counters

        steps = max(2, round(SECONDS_ENERGY / self._timed(2)))
        with EnergyMeter(gpu_counters([0])).window() as used:
            self._timed(steps)
        return {"joules": None if used.joules_total is None else used.joules_total / steps}

    def profile(self) -> dict[str, Any]:
        from benchmarks.gpu_step.kernels import kernels_of

        return kernels_of(self._once)


def main() -> None:
    case, name, *rest = sys.argv[1:]
    if rest == ["warm"]:
        Worker(case, name).warm()
        return
    answer_commands(lambda: Worker(case, name))


if __name__ == "__main__":
    main()
