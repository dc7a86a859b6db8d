"""Sweeps over training runs, each a command of its own."""
