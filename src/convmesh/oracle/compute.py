"""How long a device takes for the computations of a program."""

from __future__ import annotations

from convmesh.oracle.assumptions import STATES, Assumptions
from convmesh.oracle.estimate import Estimate
from convmesh.plan.program import BYTES_OF, Work
from convmesh.system import System


class ComputeModel:
    """Prices local work on a system's device."""

    def __init__(self, system: System, assumptions: Assumptions | None = None) -> None:
        self._device = system.device
        self._assumed = assumptions or Assumptions()

    def work(self, work: Work) -> Estimate:
        """Seconds of one operator at its local shapes."""
        device = self._device
        arithmetic = work.flops / (float(device.peak(self._format(work.dtype))) * self._fraction(work.dtype))
        memory = work.bytes_moved / (float(device.bytes_per_second_memory) * float(device.fraction_memory))
        return Estimate.of(max(arithmetic, memory, float(device.seconds_launch)), "model", 0.5)

    def update(self, elements: int, dtype: str) -> Estimate:
        """Seconds of the optimiser for so many parameters: they, their gradients and states are read and written."""
        bytes_moved = elements * BYTES_OF.get(dtype, 4) * (3 + 2 * STATES[self._assumed.optimizer])
        return self.work(Work("update", (), (), dtype, 0, bytes_moved))

    def _format(self, dtype: str) -> str:
        if dtype == "float32" and self._assumed.tf32 and "tf32" in self._device.tensor_flops_per_second:
            return "tf32"
        known = (*self._device.flops_per_second, *self._device.tensor_flops_per_second)
        return dtype if dtype in known else "float32"

    def _fraction(self, dtype: str) -> float:
        tensor = self._format(dtype) in self._device.tensor_flops_per_second
        found = self._device.fraction_tensor if tensor else None
        return float(found or self._device.fraction_vector)
