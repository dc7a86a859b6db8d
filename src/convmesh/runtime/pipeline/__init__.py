"""Pipelines: stages of layers, the schedules that run them, their weights and traffic."""
