"""Running a call in a new process, which can fork ranks that train, regardless of what this process did before."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from convmesh.errors import ConvMeshError, UnsupportedError
from convmesh.testing.ranks import RankError

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables that say which GPUs a process sees."""

NO_GPUS: Mapping[str, str | None] = dict.fromkeys(GPU_VARIABLES, "")


def in_fresh_process(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seconds_timeout: float,
    variables: Mapping[str, str | None] = NO_GPUS,
) -> Any:
    """`fn(*args, **kwargs)` in a new process, by default without GPUs; our own errors are raised here again.

    Environment `variables` are set differently there; None stands for one that is not set.
    """
    call = _pickled((fn, args, dict(kwargs)))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    try:
        with _environment(variables):
            process.start()
        theirs.close()
        ours.send_bytes(call)
        return _received(ours, 3 * seconds_timeout)
    except (EOFError, BrokenPipeError):
        process.join()
        raise UnsupportedError(
            f"`verify` needs a process of its own on a machine with GPUs, which ended with code {process.exitcode}; "
            'guard the script with `if __name__ == "__main__":`, or run `convmesh verify package.module:factory`.'
        ) from None
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _pickled(call: Any) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            "on a machine with GPUs `verify` sends model, loss and target to a process of its own, which fails: "
            f"{error}; define them in a module, run `convmesh verify package.module:factory`, or start Python with "
            "CUDA_VISIBLE_DEVICES set to nothing."
        ) from None


def _received(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise UnsupportedError(f"`verify` did not end within {seconds:.0f} s; raise `seconds_timeout`.")
    good, value = pickle.loads(pipe.recv_bytes())
    if not good:
        raise value
    return value


def _serve(pipe: Connection) -> None:
    """Answer one call; ranks that it forks end with this process."""
    fn, args, kwargs = pickle.loads(pipe.recv_bytes())
    try:
        reply = pickle.dumps((True, fn(*args, **kwargs)))
    except Exception as error:
        known = isinstance(error, (ConvMeshError, RankError))
        reply = pickle.dumps((False, error if known else RuntimeError(repr(error))))
    pipe.send_bytes(reply)


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
