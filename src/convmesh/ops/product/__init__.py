"""Products of tensors that may all be cut: matrix products, einsum, attention."""
