"""Convolutions by Triton kernels of our own where they are faster than torch's: few channels, parts of wide layers."""
