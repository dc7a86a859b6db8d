"""From a model to its split version."""

from convmesh.parallel.channels import ChannelPlan, cut_channels, plan_channels

__all__ = ["ChannelPlan", "cut_channels", "plan_channels"]
