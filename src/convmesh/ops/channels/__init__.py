"""Layers whose weights are cut by channel and filter, and dense layers."""
