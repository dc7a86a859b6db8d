"""Operators that work on each index by itself."""
