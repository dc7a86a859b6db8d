"""The command line: one file a verb, loaded when it is asked for, so that `--help` does not wait for torch."""

from convmesh.cli.main import main

__all__ = ["main"]
