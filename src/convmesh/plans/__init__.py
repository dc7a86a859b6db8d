"""Plans: a mesh and a split for every layer; programs: what each rank does under a plan."""

from convmesh.plans.plan import Pipeline, Plan, split_nodes
from convmesh.plans.plan_file import load_plan
from convmesh.plans.presets import STRATEGIES, PresetOptions, preset, strategy_for
from convmesh.plans.program import BucketProgram, NodeProgram, Program, ShowingProgram, WeightProgram
from convmesh.plans.split import Split, split_of
from convmesh.plans.steps import Held, Saved, Step, Transfer, Wait, Work

__all__ = [
    "STRATEGIES",
    "BucketProgram",
    "Held",
    "NodeProgram",
    "Pipeline",
    "Plan",
    "PresetOptions",
    "Program",
    "Saved",
    "ShowingProgram",
    "Split",
    "Step",
    "Transfer",
    "Wait",
    "WeightProgram",
    "Work",
    "load_plan",
    "preset",
    "split_nodes",
    "split_of",
    "strategy_for",
]
