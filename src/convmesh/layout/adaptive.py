"""Adaptive pooling: windows follow from the extents."""

from __future__ import annotations

from dataclasses import dataclass

from convmesh.layout.box import Span


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Output `o` of `out` reads the input from `floor(o * extent / out)` up to `ceil((o + 1) * extent / out)`."""

    out: int

    def out_extent(self, extent: int) -> int:
        del extent
        return self.out

    def window(self, o: int, extent: int) -> Span:
        return Span(o * extent // self.out, -(-(o + 1) * extent // self.out))

    def windows(self, out: Span, extent: int) -> list[Span]:
        return [self.window(o, extent) for o in range(*out)]

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        return (Span(self.window(out.start, extent).start, self.window(out.stop - 1, extent).stop),)

    def is_regular(self, extent: int) -> bool:
        """Whether windows have one length and are adjacent: then a part of the output pools its part of the input."""
        return self.out > 0 and extent % self.out == 0


def unrolled(windows: list[Span]) -> list[int | None]:
    """The indices of all windows in sequence, each as long as the longest; None past the end of a shorter one."""
    longest = max(window.extent for window in windows)
    return [i if i < w.stop else None for w in windows for i in range(w.start, w.start + longest)]
