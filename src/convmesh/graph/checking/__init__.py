"""Comparing a captured network with its model on real data."""
