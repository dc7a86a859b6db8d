"""Seconds for one rank to plan an exchange on large meshes: `python -m benchmarks.plan_speed`."""

import time
from collections.abc import Callable
from functools import partial

from convmesh.layout import ExchangePlan, Layout, Mesh, plan_conversion, plan_exchange
from convmesh.layout.maps import DimMap, Same, Window, demand, out_shape

SPATIAL = {"depth": 2, "height": 3, "width": 4}


def halo(mesh: Mesh, shape: tuple[int, ...], window: Window) -> ExchangePlan:
    """The middle rank's halo for a convolution of a tensor whose dims are cut by the mesh axes of their names."""
    cut = {0: "data"} | {dim: name for name, dim in SPATIAL.items() if dim < len(shape)}
    source = Layout.of(mesh, shape, cut)
    maps: tuple[DimMap, ...] = tuple(window if dim >= 2 else Same() for dim in range(len(shape)))
    work = source.with_shape(out_shape(maps, shape))
    return plan_exchange(source, demand(work, maps, shape), mesh.size // 2)


def gather(mesh: Mesh, shape: tuple[int, ...], cut: dict[int, tuple[str, ...]]) -> ExchangePlan:
    """The middle rank's part in making a tensor whole."""
    return plan_conversion(Layout.of(mesh, shape, cut), Layout.of(mesh, shape), mesh.size // 2)


THREE = Window(3, low=1, high=1)
PERIODIC = Window(3, low=1, high=1, mode="circular")
WIDE = Window(31, low=15, high=15)

CASES: dict[str, Callable[[], ExchangePlan]] = {
    "8 ranks, 2x2x2, kernel 3": partial(halo, Mesh(depth=2, height=2, width=2), (1, 4, 64, 64, 64), THREE),
    "4,096 ranks, 16x16x16, kernel 3": partial(halo, Mesh(depth=16, height=16, width=16), (1, 4, 512, 512, 512), THREE),
    "4,096 ranks in a line, kernel 31": partial(halo, Mesh(depth=4096), (1, 1, 8192), WIDE),
    "65,536 ranks, 64x16x8x8, kernel 3": partial(
        halo, Mesh(data=64, depth=16, height=8, width=8), (128, 4, 64, 64, 64), PERIODIC
    ),
    "65,536 ranks in a line, kernel 3": partial(halo, Mesh(depth=65536), (1, 1, 131072), PERIODIC),
    "65,536 ranks in a line, gather": partial(gather, Mesh(depth=65536), (65536,), {0: ("depth",)}),
}


def main() -> None:
    print(f"{'exchange':<36}{'seconds':>9}{'messages':>10}  carrier")
    for name, build in CASES.items():
        start = time.perf_counter()
        plan = build()
        seconds = time.perf_counter() - start
        print(f"{name:<36}{seconds:>9.4f}{len(plan.forward.receives):>10}  {plan.carrier}")


if __name__ == "__main__":
    main()
