"""The reference: one process with plain torch, and the effect of rounding on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from convmesh.dist import dry_mesh
from convmesh.graph import Captured
from convmesh.graph.checking.check_capture import CaptureCheck
from convmesh.graph.checking.distance import size_of
from convmesh.graph.checking.drawn_values import cotangent
from convmesh.graph.checking.trial_step import TrialStep
from convmesh.graph.kinds import DRAWS
from convmesh.layout import Mesh
from convmesh.ops.elementwise.noise import drawn
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.verification.drawn_batch import DrawnBatch, in_precision
from convmesh.verification.few_steps import first_rate, train
from convmesh.verification.observe import Comparer, Key, Notes, Recorder, Watched, Watcher
from convmesh.verification.shrink import capture_quietly
from convmesh.verification.troubles import told

LAST_DIGIT = 1e-15
"""The relative change of every number that shows the effect of rounding."""

_FILE = "reference.pt"


class WholeRun:
    """The model on one process, for one run, since training changes it."""

    def __init__(
        self, model: nn.Module, captured: Captured, batch: DrawnBatch, loss: Callable[..., Any] | None
    ) -> None:
        self.model, self.captured, self.batch, self.loss = model, captured, batch, loss

    def record(self, folder: str) -> str:
        """Train and save all tensors in `folder`; returns a problem, such as a capture that is not the model."""
        inputs, recorder = self.batch.inputs(), Recorder()
        problem = self._compare_capture(inputs)
        rates: list[float] = []

        def rate() -> float:
            rates.append(first_rate(self.model.parameters()))
            return rates[0]

        self._train(inputs, recorder, rate, folder)
        problem = problem or self._first_nan(recorder)
        torch.save({"values": {tuple(k): v for k, v in recorder.values.items()}, "rate": rates[0]}, _path(folder))
        return problem

    def spread(self, folder: str, floats: torch.dtype) -> dict[Key, tuple[float, float]]:
        """Train again with the effect of rounding; returns the size of each tensor, and its change.

        In float64 every number's last digit is changed; in a lower precision, everything is computed in it.
        """
        values, rate = load(folder)
        comparer = Comparer(values)
        given = self._nudged() if floats == torch.float64 else self._coarser(floats)
        self._train(given, comparer, lambda: rate, folder, floats)
        return {key: (size_of(value), comparer.errors.get(key, 0.0)) for key, value in values.items()}

    def _nudged(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(_nudged(parameter, generator))
        return [_nudged(x, generator) for x in self.batch.inputs()]

    def _coarser(self, floats: torch.dtype) -> list[torch.Tensor]:
        self.captured = capture_quietly(self.model.to(floats), self.batch.samples, self.batch.shapes, floats)
        return [in_precision(x, floats) for x in self.batch.inputs()]

    def _train(
        self,
        inputs: list[torch.Tensor],
        notes: Notes,
        rate: Callable[[], float],
        folder: str,
        floats: torch.dtype = torch.float64,
    ) -> None:
        watcher = Watcher(notes)
        network = Watched(self.captured.module, watcher, self._dropouts())
        target = tree_map(lambda t: in_precision(t, floats), self.batch.targets())

        def step() -> torch.Tensor | None:
            return backward_whole(network.run(*inputs), target, self.loss)

        def note_gradients() -> None:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    notes.note(Key("weight gradient", name), parameter.grad, ())

        with told(folder, watcher):
            train(step, [*self.model.parameters()], rate, self.batch.steps, note_gradients, watcher, notes)
        for name, tensor in self.model.state_dict().items():
            notes.note(Key("weight", name), tensor, ())

    def _first_nan(self, recorder: Recorder) -> str:
        """NaNs cannot be compared; infinities may be intended, as in masks."""
        for key, value in recorder.values.items():
            if key.what != "gradient" and value.is_floating_point() and value.isnan().any():
                name = self.captured.graph.node(key.name).layer if key.what == "output" else key.name
                return f"on one process the {key.what} of {name} is not a number; give a `sample` of real data"
        return ""

    def _dropouts(self) -> dict[str, Callable[..., Any]]:
        """Dropout and noise run on a mesh of one rank: our numbers depend on the global index and are not torch's."""
        alone = dry_mesh(Mesh())

        def run(call: Callable[[fx.Node], Any], network: Watched, node: fx.Node) -> Any:
            del call
            made = partial(_made_by, getattr(network, node.op), node.target)
            return drawn(alone, made, *network.fetch_args_kwargs_from_env(node))

        kinds = {node.name: node.kind for node in self.captured.graph.nodes}
        nodes = self.captured.module.graph.nodes
        return {n.name: run for n in nodes if kinds[n.name] in DRAWS or self._drops_attention(n)}

    def _drops_attention(self, node: fx.Node) -> bool:
        """Whether a node is an attention with dropout inside."""
        if node.op == "call_module":
            module = self.captured.module.get_submodule(str(node.target))
            return isinstance(module, nn.MultiheadAttention) and bool(module.dropout)
        if node.target is not F.scaled_dot_product_attention:
            return False
        dropped = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return isinstance(dropped, fx.Node) or bool(dropped)

    def _compare_capture(self, inputs: list[torch.Tensor]) -> str:
        """Why the captured network is not the model, or cannot be compared with it; nothing if they agree."""
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        step = TrialStep(self.model, {name: tensor.detach() for name, tensor in state.items()}, inputs)
        verdict = CaptureCheck(self.model, self.captured.module, self.captured.graph).compare(step)
        return verdict.refusal or verdict.unknown


def backward_whole(outputs: Any, target: Any, loss: Callable[..., Any] | None) -> torch.Tensor | None:
    """Backward from the loss, or from random gradients of all outputs."""
    if loss is not None:
        value: torch.Tensor = loss(outputs, target)
        value.backward()
        return value
    tensors = [y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor)]
    pairs = [(y, cotangent(index, y).to(y)) for index, y in enumerate(tensors) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return None


def load(folder: str) -> tuple[dict[Key, torch.Tensor], float]:
    """The tensors that `record` saved, mapped from the file so that ranks share its memory."""
    kept = torch.load(_path(folder), mmap=True, weights_only=True)
    return {Key(*key): value for key, value in kept["values"].items()}, kept["rate"]


def _path(folder: str) -> Path:
    return Path(folder) / _FILE


def _nudged(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    return tensor.detach() * (1 + LAST_DIGIT * noise)


def _made_by(call: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    return call(target, args, kwargs)
