"""Lowering: a plan and a network become a program, by a dry run of the runtime's own operators on one rank."""

from convmesh.lowering.lower import lower, lower_plan
from convmesh.lowering.lowered import Lowered

__all__ = ["Lowered", "lower", "lower_plan"]
