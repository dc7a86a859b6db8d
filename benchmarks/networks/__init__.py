"""Published networks, unmodified, against one process: `python -m benchmarks.networks --help`."""
