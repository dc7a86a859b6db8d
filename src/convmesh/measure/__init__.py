"""Measures this machine: operators, transfers, memory and energy."""
