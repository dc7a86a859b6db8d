"""Training without waiting: ranks take batches and bring their weights together, each at its own time."""
