"""Seconds of single computations and transfers."""
