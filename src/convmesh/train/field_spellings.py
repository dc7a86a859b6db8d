"""Fields of a run file that can be written in more than one way."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError
from tyro.constructors import PrimitiveConstructorSpec

from convmesh.plans.plan import Precision as PlanPrecision

Backend = Literal["inductor", "max-autotune", "eager"]
"""As in `cm.parallelize(compile=...)`."""

_COMPILE: dict[bool | str, str] = {
    True: "true",
    False: "false",
    "inductor": "inductor",
    "max-autotune": "max-autotune",
    "eager": "eager",
}
_RULE = f"must be {', '.join(list(_COMPILE.values())[:-1])} or eager"

_AUTOCAST = {"amp-bf16": "bf16", "amp-fp16": "fp16"}
"""From planning's names of autocast to run files': to planning, bfloat16 alone means weights of that type."""


def precision_of(name: str) -> Any:
    """The shorter of a precision's two names; resolved run files use it."""
    return _AUTOCAST.get(name, name)


def planned_precision(name: str) -> PlanPrecision:
    """A run file's precision as plans name it: autocast, or else that of the weights."""
    planned = {short: long for long, short in _AUTOCAST.items()}.get(precision_of(name), "")
    return cast(PlanPrecision, planned)


def _known(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value in _COMPILE):
        return value
    raise PydanticCustomError("compile", _RULE)  # a union's own errors would name each of its members


def _typed(texts: list[str]) -> bool | str:
    by_text = {text: value for value, text in _COMPILE.items()}
    if texts[0].lower() not in by_text:
        raise ValueError(f"{texts[0]!r} {_RULE}")
    return by_text[texts[0].lower()]


_FLAG: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="|".join(_COMPILE.values()),
    instance_from_str=_typed,
    is_instance=lambda value: value in _COMPILE,
    str_from_instance=lambda value: [_COMPILE[value]],
)

Compile = Annotated[bool | Backend, BeforeValidator(_known), _FLAG]

Precision = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64", "amp-bf16", "amp-fp16"],
    AfterValidator(precision_of),
]
