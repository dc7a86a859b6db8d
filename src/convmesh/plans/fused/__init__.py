"""What a compiler makes of a program's operators: fused kernels, read off the flow of values."""
