"""Keeps a run going: starts its ranks, watches them, and starts again with the ranks that are left; without torch."""
