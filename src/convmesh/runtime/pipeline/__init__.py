"""Layers in stages: cut, run by schedules, their weights and traffic."""
