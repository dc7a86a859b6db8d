"""Foundations of every split operator: sharded tensors, the registry, exchange plans, probes."""
