"""Pipelines: in which order ranks run stages on micro-batches, and how long that takes."""
