"""How the codes behind public runs train, where that affects time.

Habits were read in the codes' sources. Which of them to model, and the constants marked as chosen, were decided with
the shipped test runs in view, so the result on those is not blind. docs/accuracy.md says what the oracle reaches
without them, and with each changed. Codes that are not listed behave like today's: gradient reduction overlaps
backward, and devices talk directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from convmesh.oracle.pricing.assumptions import OptimizerName
from convmesh.plans.space_rows import LEAST_ROWS

MIGRATION = 5.4e9
"""Bytes a second between a device and paged host memory, over PCIe 3 (recalled, not checked; chosen)."""

HOST_COPY = 6e9
"""Bytes a second of one core's copy through shared memory, as in MPI within a node (guess; chosen)."""

JITTER = 0.015
"""Relative variation of a device's step from clocks, host and input (guess; chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A code's variant of a reference network."""

    sizes: Mapping[str, object] = field(default_factory=dict)
    sample: tuple[int, ...] | None = None
    spatial_until: str | None = None
    """The layer before which space is gathered; all ranks of a group then do the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """The habits of one code."""

    origin: str
    """Where this was read."""
    overlaps: bool = True
    """Whether the reduction of gradients overlaps backward."""
    optimizer: OptimizerName = "momentum"
    fraction_network: float = 1.0
    """Share of a node's network bandwidth that transfers can use."""
    fraction_reduction: float = 1.0
    """Share of that for the reduction of gradients."""
    staged: tuple[str, ...] = ()
    """Strategies whose transfers, except the reduction of gradients, go through MPI and host memory."""
    chained: bool = False
    """Whether a rank sends its halo before it receives one: an exchange then runs from the last rank to the first."""
    hands_out_input: bool = False
    """Whether one rank of a group that shares samples loads the batch and sends it to the others each step."""
    copies_input: bool = False
    """Whether a step begins with a copy of the group's whole batch to each device, from unpinned memory."""
    jitter: float = JITTER
    bytes_per_second_paged: float = MIGRATION
    bytes_per_second_copied: float = HOST_COPY
    least_rows: int = LEAST_ROWS
    """Rows that a rank has at least where space is cut."""
    variants: Mapping[str, Variant] = field(default_factory=dict)

    @property
    def bytes_per_second_staged(self) -> float:
        """Down to the host, across, and up again, in turn."""
        return 1 / (2 / self.bytes_per_second_paged + 1 / self.bytes_per_second_copied)


ONE_PORT = 0.5
"""ParaDL's tool counts one of a node's two ports for a ring (parallel_analysis.py, get_network_factor)."""

BOTH_WAYS = 0.5
"""A ring's input and output share one PCIe switch, which halves its bandwidth. ParaDL's tool says so ("self
contention") and counts it for hybrids only; counting it for data parallelism too was chosen."""

_CHAINER = Practice(
    origin="ankahira/paraDL and ankahira/chainermnx (models, train_*.py, halo_exchange.py), ChainerMN's communicators",
    overlaps=False,
    optimizer="adam",
    fraction_network=ONE_PORT,
    fraction_reduction=BOTH_WAYS,
    staged=("data+spatial", "data+filter"),  # which allocate managed memory
    chained=True,
    hands_out_input=True,
    copies_input=True,
    least_rows=1,
    variants={
        "resnet50": Variant(sample=(3, 226, 226)),
        "alexnet": Variant(sample=(3, 226, 226)),
        "vgg16": Variant(sizes={"pooled": 8}, sample=(3, 226, 226)),
        "cosmoflow-256": Variant(spatial_until="convolutions.2"),
        "cosmoflow-512": Variant(spatial_until="convolutions.2"),
    },
)

_WITHOUT_INPUT = replace(
    _CHAINER, hands_out_input=False, origin=f"{_CHAINER.origin}; ParaDL's tables and figures leave input out"
)

PRACTICES = {
    "ankahira/paraDL": _CHAINER,
    "ParaDL": _WITHOUT_INPUT,
    "TensorFlow benchmarks": Practice(origin="tensorflow/benchmarks, tf_cnn_benchmarks.py", optimizer="sgd"),
    "NVIDIA DeepLearningExamples": Practice(origin="NVIDIA/DeepLearningExamples: Horovod, apex and torch DDP"),
    "MLPerf": Practice(origin="MLPerf submissions' sources: reduction overlaps backward, LARS or SGD with momentum"),
}
"""By the beginning of a source's name."""

USUAL = Practice(origin="torch's DDP")


def plain(practice: Practice) -> Practice:
    """Which network a code trains, without its habits."""
    variants = {model: replace(variant, spatial_until=None) for model, variant in practice.variants.items()}
    return replace(USUAL, jitter=0.0, variants=variants)


ALIASES = {"unet3d-brats": ("unet3d", Variant(sizes={"channels": 4, "classes": 4}, sample=(4, 128, 128, 128)))}
"""Networks of public runs that are reference networks of another size: TF's UNet_3D_Medical has four channels."""


def practice_of(source: str) -> Practice:
    """The habits of the code that a run's source names."""
    return next((practice for name, practice in PRACTICES.items() if source.startswith(name)), USUAL)


def network_of(model: str, practice: Practice) -> tuple[str, Variant]:
    """The reference network of a run's model, and the code's variant of it."""
    name, variant = ALIASES.get(model, (model, Variant()))
    return name, practice.variants.get(model, variant)
