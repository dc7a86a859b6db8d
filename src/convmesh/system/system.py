"""A cluster description in numbers, each with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from convmesh.errors import MeshError
from convmesh.layout.mesh import Mesh
from convmesh.system.collective_costs import Collectives, Method
from convmesh.system.consistency import check_device, check_levels, check_methods
from convmesh.system.figure import Figure
from convmesh.system.file_tree import Entry, Problems, Tree
from convmesh.system.hardware import Device, HostNode, LinkLevel, Power
from convmesh.system.measured_tables import read_tables
from convmesh.system.operator_table import OperatorTable
from convmesh.system.parsing import Reader
from convmesh.system.placement import GroupSpan, Placement, RankGroup
from convmesh.system.saving import save
from convmesh.system.system_files import HEAD, read_tree, short_name, system_names
from convmesh.system.system_table import render
from convmesh.system.transfer_table import TransferTable


@dataclass(frozen=True)
class System:
    """`System.load("abci")`: devices, nodes, levels of links from the inside out, collectives and power."""

    name: str
    summary: str
    device: Device
    node: HostNode
    links: tuple[LinkLevel, ...]
    collectives: Collectives
    power: Power
    operators: OperatorTable | None = None
    """Measured times of operators on the device, if any."""
    transfers: TransferTable | None = None
    """Measured times of transfers over the links, if any."""

    @classmethod
    def load(cls, name_or_path: str | Path) -> System:
        """Load a system that ships with ConvMesh, or your own from a file."""
        problems = Problems(str(name_or_path))
        tree = read_tree(name_or_path, problems)
        return _system(tree, short_name(name_or_path), problems)

    @staticmethod
    def names() -> list[str]:
        """The systems that ship with ConvMesh, and your own, such as `local` after `convmesh calibrate`."""
        return system_names()

    def save(self, path: str | Path) -> Path:
        """Write a file that loads back to this system, with measured tables next to it."""
        return save(self, Path(path))

    @property
    def torch_device(self) -> str:
        """The torch device type: ranks on processors, and on single cores of them, run on a CPU."""
        return self.device.torch_type if self.node.cores is None else "cpu"

    @property
    def most_devices(self) -> int | None:
        """Devices that the links can join; None for any number."""
        outermost = self.links[-1].devices
        return None if outermost is None else int(outermost)

    def placement(self, ranks_per_node: int | None = None) -> Placement:
        """Place ranks in order on nodes, on all devices of each node or on the first `ranks_per_node`."""
        devices = int(self.node.devices)
        ranks = devices if ranks_per_node is None else ranks_per_node
        if not 1 <= ranks <= devices:
            raise MeshError(f"`ranks_per_node` (={ranks}) must be from 1 to {devices}, the devices of a node.")
        extents = tuple(None if level.devices is None else int(level.devices) for level in self.links)
        return Placement(extents, devices, ranks)

    def level_between(self, rank_a: int, rank_b: int, ranks_per_node: int | None = None) -> LinkLevel | None:
        """The level of links that joins two ranks; None for a rank with itself."""
        placement = self.placement(ranks_per_node)
        self._check_ranks(placement, (rank_a, rank_b))
        level = placement.level_between(rank_a, rank_b)
        return None if level is None else self.links[level]

    def levels_for(self, ranks: Iterable[int], ranks_per_node: int | None = None) -> tuple[LinkLevel, ...]:
        """The levels that messages among these ranks use, from the inside out."""
        placement, members = self.placement(ranks_per_node), tuple(ranks)
        self._check_ranks(placement, members)
        return tuple(self.links[level] for level in placement.levels_for(members))

    def spans(self, mesh: Mesh, axes: Iterable[str], ranks_per_node: int | None = None) -> dict[str, GroupSpan]:
        """By level: how the groups along `axes` span it, and how many share its ports."""
        placement = self.placement(ranks_per_node)
        self._check_ranks(placement, (mesh.size - 1,))
        spans = placement.spans(RankGroup.of(mesh, axes))
        return {level.name: span for level, span in zip(self.links, spans, strict=True)}

    def nodes(self, mesh: Mesh, axes: Iterable[str], ranks_per_node: int | None = None) -> int:
        """The most nodes that a group along `axes` has ranks on."""
        return self.placement(ranks_per_node).nodes(RankGroup.of(mesh, axes))

    def _check_ranks(self, placement: Placement, ranks: Iterable[int]) -> None:
        most = self.most_devices
        for rank in ranks:
            if rank < 0 or (most is not None and placement.device(rank) >= most):
                available = "devices from 0 on" if most is None else f"{most} devices, from 0 to {most - 1}"
                raise MeshError(f"rank {rank} has no place on {self.name}, whose links join {available}.")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every number, with its key in a file."""
        for part in ("device", "node"):
            yield from _figures(getattr(self, part), part)
        for level in self.links:
            yield from _figures(level, f"links.{level.name}")
        yield from _figures(self.collectives, "collectives")
        for method in self.collectives.methods:
            yield from _figures(method, f"collectives.methods.{method.name}")
        yield from _figures(self.power, "power")

    def render(self) -> str:
        """A table of all figures with their origins."""
        return render(self)

    def __str__(self) -> str:
        return self.render()


def _figures(value: object, path: str) -> Iterator[tuple[str, Figure]]:
    for f in fields(value):  # type: ignore[arg-type]
        member = getattr(value, f.name)
        if isinstance(member, Figure):
            yield f"{path}.{f.name}", member
        elif isinstance(member, Mapping):
            yield from ((f"{path}.{f.name}.{key}", figure) for key, figure in member.items())


def _system(tree: Tree, name: str, problems: Problems) -> System:
    file = f"{name}.toml"
    summary = tree.pop("summary")
    reader = Reader(file, problems)
    reader.refuse_unknown(tree, ["device", "node", "links", "collectives", "power", *HEAD])
    device = reader.value(Device, tree.get("device"), "device")
    node = reader.value(HostNode, tree.get("node"), "node")
    links = reader.named(LinkLevel, tree.get("links"), "links")
    collectives = _collectives(reader, tree.get("collectives"))
    power = reader.value(Power, tree.get("power"), "power")
    tables = read_tables(tree, problems)
    problems.raise_any()
    links.sort(key=lambda level: float("inf") if level.devices is None else level.devices.value)
    check_device(device, power, file, problems)
    check_levels(links, node, file, problems)
    check_methods(links, collectives, file, problems)
    problems.raise_any()
    return System(name, str(summary.value), device, node, tuple(links), collectives, power, **tables)


def _collectives(reader: Reader, table: Tree | Entry | None) -> Collectives:
    methods = table.get("methods") if isinstance(table, dict) else None
    rest = {key: branch for key, branch in table.items() if key != "methods"} if isinstance(table, dict) else table
    named = tuple(reader.named(Method, methods, "collectives.methods"))
    return reader.value(Collectives, rest, "collectives", methods=named)
