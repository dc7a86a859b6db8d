"""A run's token: a secret that its supervisors know and strangers do not; and how a supervisor proves that it knows it.

The secret itself never travels. Each side sends a number drawn for this connection, and shows what only a holder of
the secret can compute from both numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from convmesh.errors import RunError

VARIABLE, FILE = "CONVMESH_TOKEN", ".token"
"""Where it comes from: the environment, else a file in the run folder, which the first supervisor writes."""

LEAST_CHARACTERS = 16
"""Anyone who overhears a proof can try secrets offline: a short one would be found."""

Side = Literal["server", "client"]


@dataclass(frozen=True)
class RunToken:
    """Compared by what it proves, never by itself."""

    secret: bytes = field(repr=False)
    origin: str
    """Where it comes from, for messages."""

    def proof(self, side: Side, numbers: tuple[str, str]) -> str:
        """What this side shows; `numbers` are the server's and the client's."""
        return hmac.new(self.secret, " ".join((side, *numbers)).encode(), hashlib.sha256).hexdigest()

    def is_proven(self, proof: object, side: Side, numbers: tuple[str, str]) -> bool:
        """Whether the other side knows the secret; in constant time."""
        return hmac.compare_digest(str(proof).encode(), self.proof(side, numbers).encode())


def drawn_number() -> str:
    """Drawn for one connection: an old proof is worthless on a new one."""
    return secrets.token_hex(32)


def run_token(folder: Path) -> RunToken:
    """The token of the run in `folder`, made if there is none; ranks do not inherit one from the environment."""
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return _token_in(folder)
    if len(given) < LEAST_CHARACTERS:
        raise RunError(
            f"`{VARIABLE}` has {len(given)} characters; a token needs at least {LEAST_CHARACTERS}, "
            "such as those that `openssl rand -hex 32` prints."
        )
    return RunToken(given.encode(), VARIABLE)


def _token_in(folder: Path) -> RunToken:
    file = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _write(file)
        _check_is_private(file)
        return RunToken(file.read_bytes(), str(file))
    except OSError as error:
        raise RunError(
            f"`run` (={str(folder)!r}): the run's token, {file}, cannot be read or written ({error.strerror}); "
            f"give every host the same one in `{VARIABLE}`."
        ) from None


def _write(file: Path) -> None:
    """Write it whole or not at all: of supervisors that start at the same time, one writes and all read the same."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=FILE)  # readable by its owner alone
    try:
        os.write(descriptor, secrets.token_hex(32).encode())
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _check_is_private(file: Path) -> None:
    status = file.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RunError(
            f"{file} is the run's token, so it must be yours and readable by nobody else (`chmod 600`); "
            f"or give every host the same token in `{VARIABLE}`."
        )
    if status.st_size < LEAST_CHARACTERS:
        raise RunError(f"{file} is too short for a token ({status.st_size} bytes); delete it, and a new one is made.")
