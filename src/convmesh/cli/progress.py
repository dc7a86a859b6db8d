"""Progress messages on stderr."""

from __future__ import annotations


def progress(message: str) -> None:
    """Print a line. Not a spinner: that needs a thread, and some verbs fork ranks while it would run."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(f"[dim]{message} ...[/dim]")
