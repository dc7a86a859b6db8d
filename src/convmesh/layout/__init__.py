"""Boxes, partitions, layouts and exchange plans: plain integers and frozen values, no torch, no processes."""

from convmesh.layout.box import Box, Region, Span
from convmesh.layout.demand import Demand, DimDemand
from convmesh.layout.exchange_plan import ExchangePlan, Message, Route, plan_conversion, plan_exchange, route
from convmesh.layout.layout import Cut, Layout
from convmesh.layout.mesh import AXES, Mesh
from convmesh.layout.partition import Partition

__all__ = [
    "AXES",
    "Box",
    "Cut",
    "Demand",
    "DimDemand",
    "ExchangePlan",
    "Layout",
    "Mesh",
    "Message",
    "Partition",
    "Region",
    "Route",
    "Span",
    "plan_conversion",
    "plan_exchange",
    "route",
]
