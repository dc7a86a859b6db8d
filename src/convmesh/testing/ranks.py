"""Real ranks for tests: forked processes joined by Gloo or NCCL, with a hard time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

_fork = multiprocessing.get_context("fork")

_SECONDS_TO_JOIN = 180.0

_SECONDS_STACKS = 10.0
"""How long a rank may take to write its stacks, on a machine that is busy with other work."""

_SECONDS_FOR_OTHERS = 0.3
"""How long to wait, after one failure, for the failures of other ranks."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message carries its whole traceback."""


class _Failure(NamedTuple):
    """A rank's error and the time at which it happened."""

    at: float
    text: str


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, seconds_timeout: float = 180.0, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(*args)` on `n` forked ranks of one job; return what each returned, in rank order.

    Where torch sees a GPU, call it before this process runs a backward pass or CUDA: neither survives a fork.
    `fn` may be a closure. If a rank raises, dies or exceeds the time limit, all are killed and `RankError` says why.
    """
    with RankPool(n, seconds_timeout=seconds_timeout, first=(fn, args), backend=backend) as ranks:
        return ranks.results()


class RankPool:
    """Ranks that stay up between calls: forking 8 of them once is cheaper than once for each of a thousand examples."""

    def __init__(
        self,
        n: int,
        seconds_timeout: float = 180.0,
        first: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
        backend: str = "gloo",
    ) -> None:
        self.n = n
        self.backend = backend
        """`nccl` deals this machine's GPUs to ranks in turn."""
        self.seconds_timeout = seconds_timeout
        self._logs = tempfile.TemporaryDirectory(prefix="convmesh-ranks-")
        # Rank 0 serves the store: a server thread in this process could hold a lock while a later rank is forked.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=n)
        pipes = [_fork.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            _fork.Process(target=self._serve, args=(rank, [theirs for _, theirs in pipes], first), daemon=True)
            for rank in range(n)
        ]
        for process in self._processes:
            process.start()
        self._listener.close()
        for _, theirs in pipes:
            theirs.close()
        self.results(_SECONDS_TO_JOIN)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a picklable `fn(*args)` on every rank."""
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the rank is dead, which its reply reports
                pipe.send_bytes(call)
        return self.results()

    def results(self, seconds_timeout: float | None = None) -> list[Any]:
        """The ranks' results of the current call."""
        replies: dict[int, Any] = {}
        seconds = seconds_timeout or self.seconds_timeout
        deadline = time.monotonic() + seconds
        while len(replies) < self.n:
            arrived = self._arrived(replies, deadline - time.monotonic())
            if not arrived:
                self._fail_hung([r for r in range(self.n) if r not in replies], seconds)
            replies |= arrived
            if any(isinstance(reply, _Failure) for reply in arrived.values()):
                self._fail(replies)
        return [replies[rank] for rank in range(self.n)]

    def _arrived(self, known: dict[int, Any], seconds: float) -> dict[int, Any]:
        """New replies by rank; none if `seconds` pass without one."""
        ready = wait([self._pipes[r] for r in range(self.n) if r not in known], timeout=max(0.0, seconds))
        return {rank: self._receive(rank) for rank in range(self.n) if self._pipes[rank] in ready}

    @property
    def is_open(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._logs.cleanup()

    def _receive(self, rank: int) -> Any:
        """A rank's result, or its failure."""
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            # No rank dies because another failed, so the report lists deaths first.
            return _Failure(0.0, f"rank {rank} of {self.n} died with exit code {code} before it returned.")

    def _fail(self, replies: dict[int, Any]) -> NoReturn:
        """Report failures in the order they happened, since later ones may be consequences."""
        deadline = time.monotonic() + _SECONDS_FOR_OTHERS
        while others := self._arrived(replies, deadline - time.monotonic()):
            replies |= others
        self.close()
        failures = sorted(reply for reply in replies.values() if isinstance(reply, _Failure))
        raise RankError("\n".join(failure.text for failure in failures))

    def _fail_hung(self, ranks: list[int], seconds: float) -> NoReturn:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        stacks = "\n".join(f"rank {rank} hung at:\n{self._stack(rank)}" for rank in ranks)
        self.close()
        raise RankError(f"ranks {ranks} of {self.n} did not return within {seconds} s.\n{stacks}")

    def _stack(self, rank: int) -> str:
        """The stacks that the rank's fault handler wrote; a signal triggers it, so the file may appear late."""
        log = Path(self._logs.name) / str(rank)
        text, deadline = "", time.monotonic() + _SECONDS_STACKS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, log.read_text() if log.exists() else ""
            if text and text == before:
                return text
        return text or "(no stack was written)"

    def _serve(
        self, rank: int, pipes: list[Connection], first: tuple[Callable[..., Any], tuple[Any, ...]] | None
    ) -> None:
        pipe = pipes.pop(rank)
        # A pipe ends when its last holder closes it, so a rank must hold no other rank's end and none of its parent's.
        for other in (*pipes, *self._pipes):
            other.close()
        # After multi-threaded operators in the parent, children would wait for ever for threads that fork did not copy.
        torch.set_num_threads(1)
        gc.freeze()  # the parent's objects: no collection here needs to look at them, or copy their pages
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        log = (Path(self._logs.name) / str(rank)).open("w")
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        try:
            _reply(pipe, f"rank {rank} of {self.n}", self._join, rank)
            call = first
            while True:
                fn, args = call or pickle.loads(pipe.recv_bytes())
                _reply(pipe, f"rank {rank} of {self.n}", fn, *args)
                call = None
        except (EOFError, BrokenPipeError):
            pass
        finally:
            os._exit(0)  # skip the parent's clean-up handlers

    def _join(self, rank: int) -> None:
        # Longer than the pool's, so that the parent notices a hang first and shows where.
        timeout = timedelta(seconds=2 * self.seconds_timeout + _SECONDS_TO_JOIN)
        port, listener = self._listener.getsockname()[1], self._listener.detach()
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener}
        if rank != 0:
            os.close(listener)
            options = {"is_master": False, "timeout": timeout}
        store = dist.TCPStore("127.0.0.1", port, **options)  # type: ignore[attr-defined]
        if self.backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.n, timeout=timeout)


def _reply(pipe: Connection, who: str, fn: Callable[..., Any], *args: Any) -> None:
    """Send the result of `fn`, or its failure."""
    try:
        reply = pickle.dumps(fn(*args))
    except BaseException:
        reply = pickle.dumps(_Failure(time.monotonic(), f"{who} failed:\n{traceback.format_exc()}"))
    pipe.send_bytes(reply)
