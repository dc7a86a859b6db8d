"""Shares of samples and space that follow the measured speed of ranks and move while a network trains."""
