"""Convolutions by our own Triton kernels where they are faster than torch's: few channels, parts of wide layers."""
