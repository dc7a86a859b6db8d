"""Training from a run file: configuration, loop, run folder, evaluation, and `Trainer` for those who write Python."""
