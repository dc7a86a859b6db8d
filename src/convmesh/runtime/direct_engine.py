"""A step of a network whose layers all run on every rank: from input shards to output shards or the global loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from convmesh.dist import OpenMesh, all_reduce
from convmesh.errors import NonFiniteLossError, UnsupportedError
from convmesh.kernels.finite_check import all_finite
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.labels import Notes, raise_wrong_labels
from convmesh.ops.loss.nan_flag import NanFlag, can_be_read
from convmesh.private_torch import tree_map
from convmesh.private_torch.module_tables import buffers_of, parameters_of
from convmesh.runtime.placing import in_view

Loss = Callable[..., Any]


class DirectEngine:
    """Runs the network from its first layer to its last.

    The network runs with its plan's settings, in the view `inside`. Its outputs are on the mesh as it was opened, so
    that the weights of a loss, which no reducer knows, have their gradients summed.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        mesh: OpenMesh,
        inside: OpenMesh,
        loss: Loss | None,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.mesh, self.loss = module, mesh, loss
        self.layers = layers or {}
        """The layers of the module's nodes, by name."""
        self._inside = inside

    @property
    def networks(self) -> list[fx.GraphModule]:
        return [self.module]

    def outputs(self, inputs: list[Sharded]) -> Any:
        """The network's outputs."""
        return in_view(self.module(*in_view(inputs, self._inside)), self.mesh)

    def step(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, Any]:
        """The global loss, and the outputs from which it was computed."""
        assert self.loss is not None
        outputs = self.outputs(inputs)
        return whole_loss(self.loss(outputs, targets)), outputs

    def rebind(self, owner: nn.Module) -> None:
        """Look up again the parameters that the network reads directly, not through a layer."""
        rebind(self.module, owner)

    def layout_of(self, planned: Layout) -> Layout:
        """The plan's layouts are those of whole batches."""
        return planned


def rebind(module: nn.Module, owner: nn.Module) -> None:
    """Replace the parameters and buffers of `module` by the tensors that `owner` has under their names."""
    for path, container in module.named_modules():
        for table in (parameters_of(container), buffers_of(container)):
            for name in table:
                tensor = _tensor_at(owner, f"{path}.{name}" if path else name)
                table[name] = tensor if tensor is not None else table[name]


def _tensor_at(owner: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    try:
        return getattr(owner.get_submodule(path), last, None)
    except AttributeError:
        return None


def whole_loss(loss: Any) -> torch.Tensor:
    """The loss as a plain tensor; it must be one number, the same on all ranks."""
    if isinstance(loss, Sharded):
        if loss.layout.axes or loss.numel() != 1:
            raise UnsupportedError(
                f"`loss` gave a tensor of shape {tuple(loss.shape)}; it must give one number: "
                "use reduction='mean' or 'sum'."
            )
        return loss.local
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UnsupportedError(f"`loss` gave {loss!r:.60}; it must give one number as a tensor.")
    return loss


@dataclass(frozen=True)
class SeenLoss:
    """A step's loss, kept until it is checked."""

    step: int
    is_nan: NanFlag
    labels: Notes
    finite: torch.Tensor | None


@dataclass(frozen=True)
class JudgedOutputs:
    """What a traced step keeps of a network's outputs."""

    finite: torch.Tensor


class LossCheck:
    """Finds a loss that is NaN. On a GPU the loss of a step is read during the next one, so that nothing waits for it.

    Wrong labels always end the run. Any other NaN does so only with `ends_on_nan`.
    """

    def __init__(self, mesh: OpenMesh, ends_on_nan: bool) -> None:
        self._mesh, self._ends_on_nan = mesh, ends_on_nan
        self._step = 0
        self._last: SeenLoss | None = None

    def see(self, loss: torch.Tensor, outputs: Any, labels: Notes) -> None:
        """Note the loss of one more step."""
        if self._mesh.is_dry or not can_be_read(loss):
            return
        finite = judged(outputs).finite if self._ends_on_nan else None
        previous, self._last = self._last, SeenLoss(self._step, NanFlag(loss), labels, finite)
        self._step += 1
        seen = previous if loss.is_cuda else self._last
        if seen is not None and seen.is_nan:
            # Every rank has the same loss, so all get here together and can ask whose labels or outputs are wrong.
            raise_wrong_labels(seen.labels, self._mesh, tuple(self._mesh.mesh.axes))
            if seen.finite is not None:
                self._report(seen.step, seen.finite)

    def _report(self, step: int, finite: torch.Tensor) -> None:
        bad = torch.zeros(self._mesh.mesh.size, dtype=torch.int64)
        bad[self._mesh.rank] = int(not bool(finite))
        everywhere = all_reduce(bad.to(self._mesh.device), self._mesh, tuple(self._mesh.mesh.axes))
        ranks = [str(rank) for rank, flag in enumerate(everywhere.tolist()) if flag]
        where = f"the outputs of rank {', '.join(ranks)} are not finite" if ranks else "all ranks' outputs are finite"
        raise NonFiniteLossError(
            f"the loss of step {step} is not a number; {where}. Lower the learning rate, scale the loss "
            "(`convmesh.GradScaler`) or look at that rank's input; `check_loss=False` goes on regardless."
        )


def judged(outputs: Any) -> JudgedOutputs:
    """Whether this rank's outputs are all finite, as a tensor, so that nothing waits for it yet."""
    if isinstance(outputs, JudgedOutputs):
        return outputs
    finite: list[torch.Tensor] = []
    tree_map(lambda y: finite.append(all_finite(y.local)) if isinstance(y, Sharded) else None, outputs)
    return JudgedOutputs(torch.stack(finite).all() if finite else torch.tensor(True))
