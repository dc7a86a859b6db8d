"""Keeps a run going: starts its ranks, watches them, and restarts with the ranks that are left; without torch."""
