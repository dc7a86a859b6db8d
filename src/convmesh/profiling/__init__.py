"""Measured steps: what each rank computed, sent and waited for, next to the prediction."""
