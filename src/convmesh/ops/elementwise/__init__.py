"""Operators that work on each index independently."""
