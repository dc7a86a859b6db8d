"""What every split operator stands on: sharded tensors, the registry, exchange plans, probes."""
