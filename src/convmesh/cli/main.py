"""Finding the verb, running it, and turning whatever happens into an exit status."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convmesh.cli.exits import EXPLAINED, BadInputError, Exit
from convmesh.cli.interrupts import ends_when_told
from convmesh.errors import ConvMeshError, InfeasibleError


@dataclass(frozen=True)
class Verb:
    """Where a verb lives: a module with its options (`PlanOptions`) and `run(options)`, which gives an exit status."""

    module: str
    summary: str


VERBS = {
    "calibrate": Verb("convmesh.cli.calibrate_verb", "measure this machine into a system called local"),
    "explain": Verb("convmesh.cli.explain_verb", "what a strategy does to a layer: picture, formulas, numbers"),
    "plan": Verb("convmesh.cli.plan_verb", "rank strategies for a model on a cluster and save the best plan"),
    "scale": Verb("convmesh.cli.scale_verb", "strong and weak scaling of each strategy, with its limit named"),
    "validate": Verb("convmesh.cli.validate_verb", "compare the oracle's predictions with measured runs"),
    "verify": Verb("convmesh.cli.verify_verb", "prove a plan exact on a model before it is trusted"),
}
"""All verbs; a new one is a file and a line here."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        with ends_when_told():
            return _dispatch(given)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except InfeasibleError as error:
        return _refuse(str(error), Exit.NO_PLAN)
    except (ConvMeshError, BadInputError) as error:
        return _refuse(str(error))
    except Exception:
        return _admit_bug()


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        _write(overview())
        return Exit.DONE if given else Exit.BAD_INPUT
    if given[0] == "--version":
        _write(_version())
        return Exit.DONE
    if given[0] not in VERBS:
        near = difflib.get_close_matches(given[0], VERBS, 1)
        offer = f"did you mean {near[0]}?" if near else f"there are: {', '.join(VERBS)}."
        raise BadInputError(f"`{given[0]}` is no verb; {offer}")
    return _run(given[0], given[1:])


def _run(name: str, rest: list[str]) -> int:
    import tyro

    module: Any = importlib.import_module(VERBS[name].module)
    options = tyro.cli(
        getattr(module, f"{name.capitalize()}Options"),
        args=rest,
        prog=f"convmesh {name}",
        description=f"{VERBS[name].summary[0].upper()}{VERBS[name].summary[1:]}.\n\n{EXPLAINED}.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return int(module.run(options))


def overview() -> str:
    """What there is."""
    width = max(map(len, VERBS))
    rows = (f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    return "\n".join(["usage: convmesh VERB ...", "", *rows, "", "convmesh VERB --help tells more.", f"{EXPLAINED}."])


def _version() -> str:
    from importlib.metadata import version

    return f"convmesh {version('convmesh')}"


def _refuse(message: str, status: Exit = Exit.BAD_INPUT) -> int:
    sys.stderr.write(f"convmesh: {message}\n")
    return status


def _admit_bug() -> int:
    """The traceback goes to a file: it is for us, not for the reader."""
    kind, error, _ = sys.exc_info()
    with tempfile.NamedTemporaryFile("w", prefix="convmesh-bug-", suffix=".txt", delete=False) as file:
        file.write(f"convmesh {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
    name = kind.__name__ if kind else "error"
    sys.stderr.write(f"convmesh: a bug of ours ({name}: {error}). Please report it with {file.name}\n")
    return Exit.BUG


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
