"""A worker in a process of its own, which answers commands on its input, a line of JSON each: a failure stays there."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class RemoteWorker:
    """A worker's process, and all that it replied."""

    def __init__(self, module: str, words: list[str], log: Path) -> None:
        self.found: dict[str, Any] = {}
        command = [sys.executable, "-m", module, *words]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            start_new_session=True,  # so that what it started can be stopped with it
        )

    @property
    def is_alive(self) -> bool:
        return "failed" not in self.found

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            self.found["failed"] = "its process ended"

    def receive(self, command: str, seconds: float, limit: float | None = None) -> dict[str, Any]:
        """The reply to a command within `seconds`, what is left of `limit`; a failure or silence ends the worker."""
        reply = self._reply(command, seconds, limit or seconds) if self.is_alive else {}
        if "failed" in reply:
            self.end()
        self.found.update(reply)
        return reply

    def _reply(self, command: str, seconds: float, limit: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not self.has_replied(seconds):
            return {"failed": f"{command} took more than {limit:.0f} s"}
        line = self.process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"failed": f"its process ended while asked to {command}"}
        return reply

    def has_replied(self, seconds: float) -> bool:
        """Whether there is a reply to read, or will be within `seconds`."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, seconds))
        return bool(readable)

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        """The reply to a command, or nothing where no time is left."""
        if not self.is_alive or seconds < 1:
            return {}
        self.send(command)
        return self.receive(command, seconds)

    def pause(self) -> None:
        """Stop it and what it started, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def answer_commands(make: Callable[[], Any]) -> None:
    """The worker's side: call its method for every line, until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no reply
    worker: Any = None
    for line in sys.stdin:
        try:
            worker = worker or make()
            reply = getattr(worker, line.strip())()
        except Exception as error:
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # graphs and process groups need no farewell
