"""Normalisation with the statistics of the whole global tensor."""
