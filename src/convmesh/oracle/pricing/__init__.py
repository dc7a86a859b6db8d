"""Seconds, joules and dollars of single computations and transfers."""
