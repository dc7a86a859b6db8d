"""Sweeps of training runs, each run a separate command."""
