"""Checks that the figures of a system agree with each other."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.system.collective_costs import Collectives
from convmesh.system.file_tree import Problems
from convmesh.system.hardware import Device, HostNode, LinkLevel, Power


def check_device(device: Device, power: Power, file: str, problems: Problems) -> None:
    """Tensor cores need a fraction; a busy device draws at least as much as an idle one."""
    if bool(device.tensor_flops_per_second) != (device.fraction_tensor is not None):
        rule = "goes with `device.tensor_flops_per_second`: give both or neither"
        problems.add(file, "device.fraction_tensor", device.fraction_tensor and device.fraction_tensor.value, rule)
    if power.watts_device_busy.value < power.watts_device_idle.value:
        rule = f"must be at least `power.watts_device_idle` (={power.watts_device_idle})"
        problems.add(file, "power.watts_device_busy", str(power.watts_device_busy), rule)


def check_levels(links: Sequence[LinkLevel], node: HostNode, file: str, problems: Problems) -> None:
    """Blocks of every level consist of whole blocks of the level inside it, and a node is such a block."""
    inner, at = 1, "one device"
    for level in links:
        extent = int(level.devices) if level.devices is not None else None
        if extent is not None and (extent % inner or extent == inner):
            rule = f"must be a larger multiple of {inner}, which {at} has"
            problems.add(file, f"links.{level.name}.devices", extent, rule)
        inner, at = extent or inner, f"`links.{level.name}`"
    if unbounded := [level.name for level in links[:-1] if level.devices is None]:
        rule = "is missing: only the outermost level may join any number of devices"
        problems.add(file, f"links.{unbounded[0]}.devices", None, rule)
    _check_node(links, node, file, problems)


def _check_node(links: Sequence[LinkLevel], node: HostNode, file: str, problems: Problems) -> None:
    extents = [1, *(int(level.devices) for level in links if level.devices is not None)]
    if int(node.devices) not in extents:
        counts = ", ".join(map(str, extents))
        rule = f"must be the devices of some level of links ({counts}): set that level's `devices` too"
        problems.add(file, "node.devices", int(node.devices), rule)


def check_methods(links: Sequence[LinkLevel], collectives: Collectives, file: str, problems: Problems) -> None:
    """Some method can cross every medium of the cluster."""
    media = {level.medium for level in links}
    if not any(media <= set(method.seconds_step) for method in collectives.methods):
        rule = f"must have a method with a `seconds_step` for each of {', '.join(sorted(media))}"
        problems.add(file, "collectives.methods", None, rule)
