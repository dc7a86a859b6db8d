"""The whole training step as one traced graph: forward, loss and backward, replayed without the layers' Python."""
