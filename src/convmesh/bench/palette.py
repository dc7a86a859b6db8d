"""Colours of the lines in our plots, in the order they are used."""

COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d5a97", "#d98f00", "#3a3a3a", "#00897b", "#ad1457", "#5d4037", "#6d6d6d")
