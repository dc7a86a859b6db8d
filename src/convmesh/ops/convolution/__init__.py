"""Convolution and transposed convolution."""
