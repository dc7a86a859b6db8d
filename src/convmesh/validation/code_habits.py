"""How the codes behind public runs train, where that decides about time.

Habits were read in the codes' sources. Which of them to model, and the constants marked as chosen, were decided with
the shipped test runs in sight: on those the result is not blind. docs/accuracy.md says what the oracle reaches without
them, and with each changed. What is not in this table is what a code of today does: gradients are reduced behind
backward, devices talk directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from convmesh.oracle.pricing.assumptions import OptimizerName
from convmesh.plans.space_rows import LEAST_ROWS

MIGRATION = 5.4e9
"""Bytes a second between a device and memory of its host that is paged, over PCIe 3 (recalled, not checked; chosen)."""

HOST_COPY = 6e9
"""Bytes a second of one core's copy through shared memory, as MPI makes within a node (guess; chosen)."""

JITTER = 0.015
"""By how much of itself a device's step varies, for its clocks, its host and its input (guess; chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A reference network as a code has it."""

    sizes: Mapping[str, object] = field(default_factory=dict)
    sample: tuple[int, ...] | None = None
    spatial_until: str | None = None
    """The layer before which space is gathered again; all ranks of a group do what follows alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """What one code does."""

    origin: str
    """Where this was read."""
    overlaps: bool = True
    """Whether gradients are reduced behind backward."""
    optimizer: OptimizerName = "momentum"
    fraction_network: float = 1.0
    """Of the bandwidth of a node's network ports, what transfers can use."""
    fraction_reduction: float = 1.0
    """Of that, what the reduction of gradients can use."""
    staged: tuple[str, ...] = ()
    """Strategies under which all but the reduction of gradients goes through MPI and the host's memory."""
    chained: bool = False
    """Whether a rank sends its halo before it receives one: an exchange then runs from the last rank to the first."""
    hands_out_input: bool = False
    """Whether one rank of a group that splits samples' work loads the batch and sends it to the others each step."""
    copies_input: bool = False
    """Whether a step begins with a copy of the whole group's batch to each device, from memory that is not pinned."""
    jitter: float = JITTER
    bytes_per_second_paged: float = MIGRATION
    bytes_per_second_copied: float = HOST_COPY
    least_rows: int = LEAST_ROWS
    """Rows that a rank keeps at least where space is cut."""
    variants: Mapping[str, Variant] = field(default_factory=dict)

    @property
    def bytes_per_second_staged(self) -> float:
        """Down to the host, across, and up again, one after the other."""
        return 1 / (2 / self.bytes_per_second_paged + 1 / self.bytes_per_second_copied)


ONE_PORT = 0.5
"""ParaDL's tool counts one of a node's two ports for a ring (parallel_analysis.py, get_network_factor)."""

BOTH_WAYS = 0.5
"""What a ring takes in and gives out passes one PCIe switch, which halves its bandwidth. ParaDL's tool says so ("self
contention") and counts it for hybrids only; that it is counted for data parallelism too was chosen."""

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
    "MLPerf": Practice(origin="MLPerf submissions' sources: gradients behind backward, LARS or SGD with momentum"),
}
"""By how the name of a source begins."""

USUAL = Practice(origin="what torch's DDP does")


def plain(practice: Practice) -> Practice:
    """Only which network a code trains: nothing of how it does."""
    variants = {model: replace(known, spatial_until=None) for model, known in practice.variants.items()}
    return replace(USUAL, jitter=0.0, variants=variants)


ALIASES = {"unet3d-brats": ("unet3d", Variant(sizes={"channels": 4, "classes": 4}, sample=(4, 128, 128, 128)))}
"""Networks of public runs that are another size of a reference network: TF's UNet_3D_Medical, on four channels."""


def practice_of(source: str) -> Practice:
    """What is known of the code that a run's source names."""
    return next((known for name, known in PRACTICES.items() if source.startswith(name)), USUAL)


def network_of(model: str, practice: Practice) -> tuple[str, Variant]:
    """The reference network that a run's model stands for, and how the code has it."""
    name, variant = ALIASES.get(model, (model, Variant()))
    return name, practice.variants.get(model, variant)
