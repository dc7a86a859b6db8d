"""One layer as a user types it: `conv 256x256x3x3 on 8x256x56x56`, `linear 4096x25088 on 32x25088`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from convmesh.errors import PlanError

EXAMPLE = "conv 256x256x3x3 on 8x256x56x56"
DENSE_EXAMPLE = "linear 4096x25088 on 32x25088"

_SHAPE = r"\d+(?:[x×]\d+)*"
_TYPED = re.compile(rf"(?P<kind>\w+)\s+(?P<weight>{_SHAPE})\s+on\s+(?P<input>{_SHAPE})(?P<options>(?:\s+\w+\s+\d+)*)")
_OPTIONS = ("stride", "padding")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A convolution in one to three dims, or a dense layer, and its global input."""

    weight: Shape
    """Filters, channels, then the kernel."""
    given: Shape
    """Samples, channels, then space."""
    stride: Shape = ()
    padding: Shape = ()

    @property
    def kind(self) -> str:
        return "conv" if self.kernel else "linear"

    @property
    def filters(self) -> int:
        return self.weight[0]

    @property
    def channels(self) -> int:
        return self.weight[1]

    @property
    def kernel(self) -> Shape:
        return self.weight[2:]

    @property
    def samples(self) -> int:
        return self.given[0]

    @property
    def space(self) -> Shape:
        return self.given[2:]

    @property
    def made(self) -> Shape:
        """The output's shape."""
        dims = zip(self.space, self.kernel, self.stride, self.padding, strict=True)
        return (self.samples, self.filters, *((extent + 2 * p - k) // s + 1 for extent, k, s, p in dims))

    @property
    def elements(self) -> dict[str, int]:
        """Numbers of elements of x, w and y."""
        return {"x": math.prod(self.given), "w": math.prod(self.weight), "y": math.prod(self.made)}

    @property
    def following(self) -> LayerSpec:
        """A layer like this one that preserves its input's shape: the next stage of a pipeline."""
        kernel = tuple(k if k % 2 else k - 1 for k in self.kernel)
        return LayerSpec(
            weight=(self.filters, self.filters, *kernel),
            given=self.made,
            stride=(1,) * len(kernel),
            padding=tuple(k // 2 for k in kernel),
        )

    def __str__(self) -> str:
        """As a user types it."""
        shapes = f"{self.kind} {_typed(self.weight)} on {_typed(self.given)}"
        stride = f" stride {self.stride[0]}" if any(s > 1 for s in self.stride) else ""
        same = all(p == (k - 1) // 2 for p, k in zip(self.padding, self.kernel, strict=True))
        return shapes + stride + ("" if same else f" padding {self.padding[0]}")


def parse_layer(text: str) -> LayerSpec:
    """Parse a layer; an error names the mistake and the nearest layer that works."""
    match = _TYPED.fullmatch(text.strip())
    if match is None or match["kind"] not in ("conv", "linear"):
        raise PlanError(
            f"`layer` (={text!r}) must be a layer such as {EXAMPLE!r}, optionally with ` stride 2` or ` padding 0`, "
            f"{DENSE_EXAMPLE!r}, or a reference network's, such as 'resnet50:stage3.0.body.1.conv'."
        )
    weight, given = _shape(match["weight"]), _shape(match["input"])
    options = _options(match["options"].split(), text)
    space = len(given) - 2
    kernel = weight[2:]
    layer = LayerSpec(
        weight=weight,
        given=given,
        stride=(options.get("stride", 1),) * space,
        padding=tuple(options.get("padding", (k - 1) // 2) for k in kernel),
    )
    check_layer(layer, match["kind"], text)
    return layer


def check_layer(layer: LayerSpec, kind: str, text: str) -> None:
    """Refuse shapes that do not match."""
    dims, space = len(layer.weight) - 2, len(layer.given) - 2
    if min(*layer.weight, *layer.given) < 1 or 0 in layer.stride:
        raise PlanError(f"`layer` (={text!r}): every extent, and the stride, must be at least 1.")
    if (kind == "conv") != (0 < dims <= 3) or dims < 0:
        rule = "filters x channels" + (" x kernel in 1 to 3 dims" if kind == "conv" else "")
        example = EXAMPLE if kind == "conv" else DENSE_EXAMPLE
        raise PlanError(f"`layer` (={text!r}): the weight of a {kind} must be {rule}, as in {example!r}.")
    if dims != space:
        raise PlanError(f"`layer` (={text!r}): a kernel of {dims} dims needs an input of samples, channels and {dims}.")
    if layer.weight[1] != layer.given[1]:
        fixed = _typed((layer.weight[0], layer.given[1], *layer.weight[2:]))
        raise PlanError(
            f"`layer` (={text!r}): the weight has {layer.weight[1]} channels, the input {layer.given[1]}; "
            f"did you mean {kind} {fixed}? Filters come first, as in torch."
        )
    if min(layer.made) < 1:
        raise PlanError(f"`layer` (={text!r}): the kernel is larger than the padded input, so the output is empty.")


def _shape(text: str) -> Shape:
    return tuple(int(part) for part in re.split("[x×]", text))


def _typed(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _options(words: list[str], text: str) -> dict[str, int]:
    options = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for name in options:
        if name not in _OPTIONS:
            raise PlanError(
                f"`layer` (={text!r}): {name!r} is not an option; the options are {' and '.join(_OPTIONS)}."
            )
    return options
