"""Local kernels: the fastest way for this device to compute a shard."""
