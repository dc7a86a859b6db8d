"""The clocks of all ranks through one step."""
