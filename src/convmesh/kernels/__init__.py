"""Local kernels: how this device computes a shard fastest."""
