"""The command line: one file per verb, imported on demand so that `--help` does not wait for torch."""

from convmesh.cli.main import main, script

__all__ = ["main", "script"]
