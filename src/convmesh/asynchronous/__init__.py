"""Training without waiting: ranks take batches and merge their weights, each at its own pace."""
