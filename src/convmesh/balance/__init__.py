"""Shares of samples and space by the measured speed of ranks, moved while a network trains."""
