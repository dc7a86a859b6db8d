"""Finds the verb, runs it, and turns the outcome into an exit status."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from convmesh.cli.exits import EXPLAINED, BadInputError, Exit
from convmesh.cli.interrupts import shuts_down_on_signals
from convmesh.cli.warning_lines import warns_in_a_line
from convmesh.errors import ConvMeshError, InfeasibleError, LostRankError, UnwritableError


@dataclass(frozen=True)
class Verb:
    """The module of a verb, with its options (`PlanOptions`) and `run(options)`, which returns an exit status."""

    module: str
    summary: str


VERBS = {
    "bench": Verb("convmesh.cli.bench_verb", "train over batch sizes and ranks: accuracy and time of each"),
    "calibrate": Verb("convmesh.cli.calibrate_verb", "measure this machine and save it as the system local"),
    "data": Verb("convmesh.cli.data_verb", "make samples, convert files of them, or show what a file holds"),
    "doctor": Verb("convmesh.cli.doctor_verb", "show what this machine has, what is missing, and what to do"),
    "explain": Verb("convmesh.cli.explain_verb", "show what a strategy does to a layer: picture, formulas, numbers"),
    "export": Verb("convmesh.cli.export_verb", "write a run's weights to one safetensors file for a single device"),
    "launch": Verb(
        "convmesh.cli.launch_verb", "write what starts a run under SLURM, Kubernetes or Ray, or start it by ssh"
    ),
    "plan": Verb("convmesh.cli.plan_verb", "rank strategies for a model on a cluster and save the best plan"),
    "profile": Verb("convmesh.cli.profile_verb", "show where a run's steps spend their time, next to the prediction"),
    "scale": Verb("convmesh.cli.scale_verb", "predict strong and weak scaling of each strategy, and what limits it"),
    "train": Verb("convmesh.cli.train_verb", "train a network as a run file says, on any number of ranks"),
    "validate": Verb("convmesh.cli.validate_verb", "compare the oracle's predictions with measured runs"),
    "verify": Verb("convmesh.cli.verify_verb", "check that a plan is exact on a model before you trust it"),
}
"""All verbs. To add one, add a file and a line here."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    typed = list(sys.argv[1:] if args is None else args)
    try:
        with shuts_down_on_signals(), warns_in_a_line():
            return _dispatch(typed)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except LostRankError as error:
        return _refuse(str(error), Exit.LOST_RANK)
    except UnwritableError as error:
        return _refuse(str(error), _unwritable())
    except InfeasibleError as error:
        return _refuse(str(error), Exit.NO_PLAN)
    except (ConvMeshError, BadInputError) as error:
        return _refuse(str(error))
    except Exception:
        return _admit_bug()


ENDED_AT_ONCE = {"plan", "scale"}
"""Verbs after which nothing is left to do: freeing the values of a search one by one takes a second."""


def script() -> NoReturn:
    """Run the command that was typed, and end the process."""
    status = main()
    # After a failure of a rank, threads of its process groups may abort the interpreter's own exit, which would turn
    # "bad input" into a crash.
    if "RANK" in os.environ or not ENDED_AT_ONCE.isdisjoint(sys.argv[1:2]):
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        _write(overview())
        return Exit.DONE if args else Exit.BAD_INPUT
    if args[0] == "--version":
        _write(_version())
        return Exit.DONE
    if args[0] not in VERBS:
        near = difflib.get_close_matches(args[0], VERBS, 1)
        offer = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(VERBS)}."
        raise BadInputError(f"`{args[0]}` is not a verb; {offer}")
    return _run(args[0], args[1:])


def _run(name: str, rest: list[str]) -> int:
    module: Any = importlib.import_module(VERBS[name].module)
    if hasattr(module, "parsed"):  # flags override a file, which they name
        options = module.parsed(partial(_parsed, module, name, rest))
    else:
        options = _parsed(module, name, rest)
    return int(module.run(options))


def _parsed(module: Any, name: str, rest: list[str], default: Any = None) -> Any:
    import tyro

    given: dict[str, Any] = {} if default is None else {"default": default}
    if hasattr(module, "flags"):
        given["registry"] = module.flags()
    return tyro.cli(
        getattr(module, f"{name.capitalize()}Options"),
        args=rest,
        prog=f"convmesh {name}",
        description=f"{VERBS[name].summary[0].upper()}{VERBS[name].summary[1:]}.\n\n{EXPLAINED}.",
        config=() if hasattr(module, "parsed") else (tyro.conf.FlagCreatePairsOff,),
        **given,
    )


def overview() -> str:
    """The usage line and every verb with its summary."""
    width = max(map(len, VERBS))
    rows = (f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    more = "Run convmesh VERB --help for the options of a verb."
    return "\n".join(["usage: convmesh VERB ...", "", *rows, "", more, f"{EXPLAINED}."])


def _unwritable() -> Exit:
    """For a supervisor it is worth another try; for a user it is a mistake like any other."""
    from convmesh.supervise.following import LAUNCHER

    return Exit.UNWRITABLE if LAUNCHER in os.environ else Exit.BAD_INPUT


def _version() -> str:
    from convmesh.versions import own_version

    return f"convmesh {own_version()}"


def _refuse(message: str, status: Exit = Exit.BAD_INPUT) -> int:
    sys.stderr.write(f"convmesh: {message}\n")
    return status


def _admit_bug() -> int:
    """Write the traceback to a file: it is for us, not for the user."""
    kind, error, _ = sys.exc_info()
    with tempfile.NamedTemporaryFile("w", prefix="convmesh-bug-", suffix=".txt", delete=False) as file:
        file.write(f"convmesh {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
    name = kind.__name__ if kind else "error"
    sys.stderr.write(f"convmesh: this is a bug in ConvMesh ({name}: {error}). Please report it with {file.name}\n")
    return Exit.BUG


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
