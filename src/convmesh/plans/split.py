"""The choice for one layer: which axes cut its work, and how its channels are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from convmesh.errors import PlanError
from convmesh.layout.channels import Sums
from convmesh.layout.layer_dims import space_dims
from convmesh.layout.mesh import AXES, SPACE_AXES, Mesh

Axes = tuple[str, ...]
Algorithm = Literal["auto", "x", "y", "w"]

DIMS = ("sample", *SPACE_AXES, "channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """For each dim of a layer's input the axes that cut it, outermost first.

    `channel` cuts the layer's weight too; `algorithm` says what stays in place: the input ("x"), the output ("y") or
    the weight ("w", two axes); "auto" takes the one that moves the least. `sums` says where a dense layer's partial
    outputs are summed to under x and w: parts of its features, every rank ("whole") or parts of its tokens ("token").
    """

    sample: Axes = ()
    depth: Axes = ()
    height: Axes = ()
    width: Axes = ()
    channel: Axes = ()
    algorithm: Algorithm = "auto"
    sums: Sums = "channel"

    def __post_init__(self) -> None:
        names = self.axes
        for name in names:
            if name not in AXES:
                raise PlanError(f"axis {name!r} is no mesh axis; the axes are {', '.join(AXES)}.")
            if names.count(name) > 1:
                raise PlanError(f"axis {name!r} cuts two dims of one layer; one axis cuts one dim.")
        if self.algorithm not in get_args(Algorithm):
            raise PlanError(f"`algorithm` (={self.algorithm!r}) must be one of {', '.join(get_args(Algorithm))}.")
        if self.sums not in get_args(Sums):
            raise PlanError(f"`sums` (={self.sums!r}) must be one of {', '.join(get_args(Sums))}.")

    @property
    def axes(self) -> Axes:
        """All axes that cut a dim."""
        return self.sample + self.depth + self.height + self.width + self.channel

    def cut(self, dims: int, channels_last: bool = False) -> dict[int, Axes]:
        """The axes by index of dim, without channels, for a tensor of `dims` dims: N, C, then space; or N, space, C."""
        space = space_dims(dims, channels_last).items()
        by_dim = {0: self.sample, **{dim: getattr(self, name) for name, dim in space}}
        return {dim: axes for dim, axes in by_dim.items() if axes}

    def on(self, mesh: Mesh) -> Split:
        """The same without axes that the mesh does not have."""
        kept = {dim: tuple(name for name in getattr(self, dim) if name in mesh.axes) for dim in DIMS}
        return Split(**kept, algorithm=self.algorithm, sums=self.sums)

    def __str__(self) -> str:
        """`sample:data depth:depth channel:filter(y)`, or `whole`."""
        parts = [f"{dim}:{'*'.join(getattr(self, dim))}" for dim in DIMS if getattr(self, dim)]
        sums = "" if self.sums == "channel" else f", sums {self.sums}"
        return (" ".join(parts) + (f"({self.algorithm}{sums})" if self.channel else "")) or "whole"


def split_of(value: Split | Mapping[str, Any], layer: str) -> Split:
    """A split as a user writes it: `{"sample": "data", "channel": ["channel", "filter"], "algorithm": "w"}`."""
    if isinstance(value, Split):
        return value
    keys = [field.name for field in fields(Split)]
    if not isinstance(value, Mapping):
        raise PlanError(f"layer {layer!r}: a split (={value!r}) maps {', '.join(keys)} to axes.")
    if unknown := [key for key in value if key not in keys]:
        raise PlanError(f"layer {layer!r}: a split has no {unknown[0]!r}; it has {', '.join(keys)}.")
    try:
        read: dict[str, Any] = {k: _axes(v) if k in DIMS else v for k, v in value.items()}
        return Split(**read)
    except PlanError as error:
        raise PlanError(f"layer {layer!r}: {error}") from None


def _axes(value: Any) -> Axes:
    return (value,) if isinstance(value, str) else tuple(value)


def to_plain(split: Split) -> dict[str, Any]:
    """The inverse of `split_of`."""
    plain: dict[str, Any] = {}
    for dim in DIMS:
        if axes := getattr(split, dim):
            plain[dim] = axes[0] if len(axes) == 1 else list(axes)
    if split.channel:
        plain["algorithm"] = split.algorithm
        plain |= {} if split.sums == "channel" else {"sums": split.sums}
    return plain
