"""Whole training steps on one GPU beside the oracle's predictions of them."""
