"""Normalisation with statistics of the whole global tensor."""
