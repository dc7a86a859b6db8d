"""Measuring the machine at hand: operators, transfers, memory and energy."""
