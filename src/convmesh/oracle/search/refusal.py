"""Why a strategy has no plan on a mesh: a value with a kind, which is compared, and a text, which is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from convmesh.plans.program_table import amount
from convmesh.plans.space_rows import LEAST_ROWS


class RefusalKind(Enum):
    """What stands in the way."""

    SAMPLES = "more ranks than samples"
    ROWS = "too few rows for the ranks"
    FILTERS = "more ranks than filters"
    DENSE = "no dense layers"
    STAGES = "more ranks than stages"
    MEMORY = "more memory than a device has"
    ERROR = "refused while planning"
    NO_MESH = "the ranks make no mesh for the strategy"
    NOT_EVALUATED = "left out of the search"
    BEYOND_LIMIT = "beyond the strategy's limit"


_RULES: Mapping[RefusalKind, str] = {
    RefusalKind.SAMPLES: "{needed} ranks > {limit} samples",
    RefusalKind.ROWS: f"{{needed}} ranks of {LEAST_ROWS} rows > extent {{limit}} of {{layer}}{{detail}}",
    RefusalKind.FILTERS: "{needed} ranks > {limit} filters of {layer}",
    RefusalKind.DENSE: "the network has no dense layers",
    RefusalKind.STAGES: "{needed} ranks > {limit} stages",
    RefusalKind.NO_MESH: "{needed} ranks make no mesh for it",
    RefusalKind.NOT_EVALUATED: "not evaluated{detail}",
    RefusalKind.BEYOND_LIMIT: "beyond its limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`data: 16 ranks > 8 samples`: what is needed, what there is, and where."""

    kind: RefusalKind
    subject: str = ""
    """The mesh axis or the strategy that is refused."""
    needed: int = 0
    limit: int = 0
    layer: str = ""
    detail: str = ""
    """What the numbers do not say."""

    @property
    def rule(self) -> str:
        """The text without its subject."""
        if self.kind is RefusalKind.ERROR:
            return self.detail
        if self.kind is RefusalKind.MEMORY:
            return f"{amount(self.needed)} > {amount(self.limit)} at layer {self.layer}"
        numbers = {"needed": self.needed, "limit": self.limit, "layer": self.layer, "detail": self.detail}
        return _RULES[self.kind].format(**numbers)

    def __str__(self) -> str:
        return f"{self.subject}: {self.rule}" if self.subject else self.rule
