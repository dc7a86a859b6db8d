"""What is being done, on stderr, for people who wait."""

from __future__ import annotations


def progress(message: str) -> None:
    """A line, not a spinner: that would be a thread, and some verbs fork ranks meanwhile."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(f"[dim]{message} ...[/dim]")
