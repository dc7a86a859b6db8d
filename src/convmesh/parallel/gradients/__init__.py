"""Weight gradients: summed over ranks, clipped, scaled, and handed to optimisers."""
