"""The strategy: Lightning's loop, hooks and checkpoints around a network that convmesh splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from convmesh.dist.barriers import wait_for_all
from convmesh.layout import Mesh
from convmesh.lightning.job import all_reduced, batch_words, joined, same_random_numbers
from convmesh.lightning.lightning_package import part
from convmesh.lightning.precision_plugins import adapted
from convmesh.lightning.split_module import Outputs, SplitModule, plain_numbers, whole_tensors
from convmesh.lightning.split_setting import PlanSource, SplitSetting
from convmesh.lightning.whole_state import loaded_into, optimizer_state_for, whole_state
from convmesh.plans import Plan
from convmesh.runtime.direct_engine import whole_loss

_strategies: Any = part("strategies")
_launchers: Any = part("strategies.launchers")
_rank_zero: Any = part("utilities.rank_zero")


class MeshStrategy(_strategies.ParallelStrategy):  # type: ignore[misc]
    """`Trainer(strategy=MeshStrategy(plan="auto"), devices=4)`: the module's network is split over all ranks.

    `plan` is "auto", a preset's name, a plan file, or a plan; `mesh` is for presets, and chosen if left out. `network`
    names the part of the module to split; by default the only one with weights, or else the module itself. Every rank
    reads the whole batch. In steps the network's outputs are `Sharded`, so torch functions of them act on the whole
    batch; with `outputs="whole"` they are plain tensors that every rank has whole. `sample` gives the shape of a batch
    (several in a list), if the loader's first batch should not. `start_method` is how Lightning starts ranks: "popen"
    runs the script again, "fork" is for notebooks. After `fit` the module has whole weights again.
    """

    def __init__(
        self,
        plan: PlanSource = "auto",
        mesh: Mesh | None = None,
        *,
        network: str | None = None,
        outputs: Outputs = "cut",
        sample: Any = None,
        start_method: Literal["popen", "fork", "spawn"] = "popen",
        seconds_timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._setting = SplitSetting(plan, mesh, network, outputs, sample)
        self._start_method, self._seconds_timeout = start_method, seconds_timeout
        self._split: SplitModule | None = None
        self._failed = False
        self.num_nodes = 1

    @property
    def plan(self) -> Plan | None:
        """The plan in use, once a trainer has set it up."""
        return None if self._split is None else self._split.plan

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell the environment, which Lightning may have created, this process's place."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        _rank_zero.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            self._launcher = _launchers._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = _launchers._MultiProcessingLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        joined(self.cluster_environment, self.root_device, self._seconds_timeout)
        self.accelerator.setup_device(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Called by `setup`, before optimisers are made: cut weights are different parameters."""
        self._failed = False
        same_random_numbers()
        self._split = self._setting.split(self.lightning_module, self)
        adapted(self.precision_plugin, self._split.mesh)
        return model

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Other ranks may be elsewhere: nothing is gathered from now on."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._split is not None:
            self._split.end(makes_whole=not self._failed)
        if not self._failed:
            self.lightning_module.cpu()
        for ending in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            ending.teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once an epoch: a rank with samples of its own would silently train something else."""
        if batch_idx == 0 and self._split is not None:
            self._split.mesh.agree(
                "the batch, which every rank must read alike (no sampler by rank; `seed_everything` for random ones)",
                batch_words(batch),
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            result = super().training_step(*args, **kwargs)
            if isinstance(result, Mapping):
                return {**plain_numbers(result), "loss": _loss(result.get("loss"))}
            return _loss(result)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return plain_numbers(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return plain_numbers(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return whole_tensors(super().predict_step(*args, **kwargs))

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return super().backward(_loss(closure_loss), *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Called while gradients accumulate."""
        assert self._split is not None
        with self._split.net.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of one device, on every rank."""
        return whole_state(self.lightning_module.state_dict(), self._mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        loaded_into(self.lightning_module, checkpoint["state_dict"], self._mesh, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser state of one device, on every rank."""
        return whole_state(super().optimizer_state(optimizer), self._mesh)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(optimizer_state_for(optimizer, state, self._mesh))

    @property
    def _mesh(self) -> Any:
        return None if self._split is None else self._split.mesh

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Every rank already has the whole batch's value, so sums and means over ranks are their mean."""
        return all_reduced(plain_numbers(tensor), group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - as Lightning names it
        flag = torch.tensor(float(decision), device=self.root_device)
        return bool(all_reduced(flag, None, "min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        del name
        if dist.is_initialized():
            wait_for_all()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        told = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src)
        return told[0]


def _loss(found: Any) -> Any:
    return found if found is None else whole_loss(found)


@contextmanager
def _explained() -> Iterator[None]:
    """Suggest alternatives if a step cannot run on sharded outputs."""
    try:
        yield
    except Exception as error:
        if "Sharded" in str(error) or "split version" in str(error):
            error.add_note(
                "In steps the network's output is `Sharded`; `MeshStrategy(outputs='whole')` gives a plain tensor, "
                "whole on every rank."
            )
        raise
