"""Spawns ranks as fresh processes of one job: NCCL if each has a GPU, else Gloo.

CUDA does not survive a fork, so ranks that use it are spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from convmesh.dist import init

SECONDS_TIMEOUT = 600.0


def spawned(ranks: int, call: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a module-level function on new ranks of one job; the list holds the first rank's result."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    port = _free_port()
    processes = [
        context.Process(target=_serve, args=(rank, ranks, port, theirs, call, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        return [_received(ours, ranks)]
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()


def _received(pipe: Connection, ranks: int) -> Any:
    try:
        if pipe.poll(SECONDS_TIMEOUT):
            return pipe.recv()
    except EOFError:
        raise RuntimeError(f"one of {ranks} ranks died before it sent a result; its traceback is above.") from None
    raise TimeoutError(f"{ranks} ranks sent no result within {SECONDS_TIMEOUT:g} s.")


def _serve(rank: int, ranks: int, port: int, pipe: Connection, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    init()
    result = call(*args)
    if rank == 0:
        pipe.send(result)
    torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
