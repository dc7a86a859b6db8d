"""Operators that move values without changing them: pads, slices, joins, reshapes, resizes."""
