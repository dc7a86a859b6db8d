"""Reductions over dims, and softmax."""
