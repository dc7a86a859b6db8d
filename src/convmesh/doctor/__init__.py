"""Says what this machine offers ConvMesh, what is missing, and what to do about it; and the same for a model."""

from convmesh.doctor.examine import examine
from convmesh.doctor.finding import Finding, State
from convmesh.doctor.model_findings import ModelFinding, ModelReport, examine_model

__all__ = ["Finding", "ModelFinding", "ModelReport", "State", "examine", "examine_model"]
