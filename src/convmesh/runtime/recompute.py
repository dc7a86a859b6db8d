"""Blocks whose activations are recomputed in backward, transfers included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from convmesh.dist import OpenMesh
from convmesh.layout import Layout
from convmesh.ops.core.mask_seeds import SeedPlace, same_seeds, seed_place
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_flatten, tree_unflatten


class Recomputed(nn.Module):
    """A block that keeps only its inputs. All ranks recompute it at the same point of backward."""

    def __init__(self, block: nn.Module, mesh: OpenMesh) -> None:
        super().__init__()
        self._block, self._mesh = block, mesh

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._block(*args)
        leaves, spec = tree_flatten(args)
        layouts = [x.layout if isinstance(x, Sharded) else None for x in leaves]
        values = [x.local if isinstance(x, Sharded) else x for x in leaves]
        run = _Replay(self._block, self._mesh, layouts, spec)
        # No early stop: a rank that stopped early would leave the others waiting in their transfers.
        with set_checkpoint_early_stop(False):
            results = checkpoint(run, *values, use_reentrant=False)
        assert run.outputs is not None
        output_layouts, output_spec = run.outputs
        pairs = zip(results, output_layouts, strict=True)
        return tree_unflatten([Sharded(y, at, self._mesh) if at else y for y, at in pairs], output_spec)


class _Replay:
    """The block on plain tensors; the second run draws the same masks and leaves running statistics alone."""

    def __init__(self, block: nn.Module, mesh: OpenMesh, layouts: list[Layout | None], spec: Any) -> None:
        self._block, self._mesh, self._layouts, self._spec = block, mesh, layouts, spec
        self._seeds: SeedPlace | None = None
        self.outputs: tuple[list[Layout | None], Any] | None = None
        """The layouts of the outputs' leaves, and their structure."""

    def __call__(self, *values: Any) -> list[Any]:
        if self._seeds is None:
            self._seeds = seed_place(self._mesh)
            return self._run(values)
        with self._as_before():
            return self._run(values)

    def _run(self, values: tuple[Any, ...]) -> list[Any]:
        pairs = zip(values, self._layouts, strict=True)
        args = tree_unflatten([Sharded(x, at, self._mesh) if at else x for x, at in pairs], self._spec)
        leaves, spec = tree_flatten(self._block(*args))
        self.outputs = [x.layout if isinstance(x, Sharded) else None for x in leaves], spec
        return [x.local if isinstance(x, Sharded) else x for x in leaves]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        assert self._seeds is not None
        buffers = [(b, b.detach().clone()) for b in self._block.buffers()]
        try:
            with same_seeds(self._mesh, self._seeds):
                yield
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
