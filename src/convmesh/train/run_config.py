"""The run file as values: every field has a default and a line that `--help` and the reference page show."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from convmesh.balance.fair_shares import MEASURED
from convmesh.plans.summing import Compression
from convmesh.train.field_spellings import Compile, Precision
from convmesh.train.flag_tables import Table
from convmesh.train.plan_fields import Axes, Strategy

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
"""0 means none."""
Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The network."""

    name: str = "lenet5"
    """A reference network's name, or package.module:factory."""
    args: Table = {}
    """Arguments of the factory by name, e.g. { filters = 8 }."""


class AugmentConfig(Section):
    """Changes of the training samples, drawn anew for every sample and epoch."""

    flip: str = ""
    """Dims to reverse, each for half of the samples, e.g. "DHW"."""
    rotate90: tuple[str, ...] = ()
    """Planes to rotate by 0 to 3 quarter turns, e.g. ["HW", "DH"]."""
    crop: tuple[Count, ...] = ()
    """Size of a window cut out at a random place, e.g. [64, 64, 64]; of test samples the middle is taken."""
    intensity: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Inputs are multiplied by a random factor within 1 ± this."""
    shift: Amount = 0.0
    """A random value within ± this is added to inputs."""


class DataConfig(Section):
    """What to train on."""

    source: str = "digits"
    """A generator (digits, cosmology, fractals), a file or folder, or package.module:function for a torch Dataset."""
    args: Table = {}
    """Arguments of the generator, of the function, or the names of arrays in a file."""
    test_source: str = ""
    """What to evaluate on, like `source`; by default a generator's own test set, or else nothing."""
    test_args: Table = {}
    """Arguments of `test_source`; a generator's test set takes those of `args`, overridden by these."""
    threads: Count = 2
    """Reader threads of each rank."""
    prefetch: Count = 2
    """Batches to read ahead."""
    store_gib: Amount = 0.0
    """GiB of memory on each rank to keep samples in: after the first epoch they come from there, not from disk."""
    augment: AugmentConfig = AugmentConfig()


class PlanConfig(Section):
    """How the network is split."""

    strategy: Strategy = "auto"
    """auto, a preset (data, spatial, filter, channel, pipeline, hybrid, or a pair such as data+spatial), or a file."""
    mesh: Axes = {}
    """Ranks of each axis, e.g. { data = 2, depth = 2 }; without it ConvMesh chooses."""
    batchnorm: Literal["global", "replica"] = "global"
    """Batch statistics over the global batch, or over each replica's samples as in DDP."""
    reduction: Literal["bucketed", "sharded", "hierarchical"] = "bucketed"
    """Sharded: the optimiser's state is cut over data (ZeRO stage 1); hierarchical: sums inside hosts come first."""
    ranks_per_host: CountOrNone = 0
    """Ranks on each host, for a hierarchical reduction; 0 takes what the job has."""
    compression: Compression = "none"
    """For slow links: gradients are summed in bf16, or in low rank (PowerSGD), which changes training."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass to save memory, e.g. ["down.*"]."""
    system: str = "auto"
    """The cluster for searches and predictions: a name, a file, or auto, which is this machine."""
    predict: bool = True
    """Whether to predict the time of a step."""


class OptimizerConfig(Section):
    """The optimiser."""

    name: Literal["sgd", "adamw", "lars", "lamb"] = "adamw"
    """The algorithm; lars and lamb scale each layer's update by the norm of its weights, for large batches."""
    lr: Positive = 1e-3
    """Learning rate, before the schedule."""
    momentum: Fraction = 0.9
    """Momentum of sgd and lars."""
    nesterov: bool = False
    """Nesterov's momentum in sgd."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the running averages in adamw and lamb."""
    eps: Positive = 1e-8
    """Added to the denominators in adamw and lamb."""
    weight_decay: Amount = 0.0
    """Weight decay."""
    decay_vectors: bool = False
    """Whether weight decay, and the scaling of lars and lamb, apply to biases and norms too."""
    trust: Positive = 1e-3
    """Trust coefficient of lars."""


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    name: Literal["constant", "cosine", "step", "polynomial"] = "cosine"
    """The shape after the warm-up."""
    warmup_epochs: Amount = 0.0
    """Epochs over which the learning rate rises linearly from 0."""
    epochs: Amount = 0.0
    """Length in epochs; 0 takes that of the run."""
    final: Fraction = 0.0
    """Where cosine and polynomial end, as a fraction of `optimizer.lr`."""
    milestones: tuple[Amount, ...] = ()
    """For step: epochs after which the learning rate is multiplied by `gamma`."""
    gamma: Positive = 0.1
    """For step: the factor."""
    power: Positive = 1.0
    """For polynomial: the exponent; 1 is linear."""


class EvaluationConfig(Section):
    """How often the network is tested, and by which metrics."""

    every_epochs: CountOrNone = 1
    """Epochs between evaluations; 0 evaluates at the end only."""
    every_steps: CountOrNone = 0
    """Steps between further evaluations; 0 makes none."""
    batch: CountOrNone = 0
    """Global batch of an evaluation; 0 takes that of training."""
    metrics: tuple[Literal["auto", "accuracy", "dice", "r2"], ...] = ("auto",)
    """What to compute besides the loss; auto decides by the target: accuracy, dice per voxel, r2 of values."""


class CheckpointConfig(Section):
    """How often the state is saved."""

    every_epochs: CountOrNone = 1
    """Epochs between checkpoints; 0 saves at the end only."""
    every_steps: CountOrNone = 0
    """Steps between further checkpoints; 0 makes none."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written."""


class BalanceConfig(Section):
    """Shares of samples and space by the measured speed of ranks."""

    mode: Literal["off", "auto"] = "off"
    """auto: ranks are measured while they train, and the faster ones get more of each batch or volume."""
    every: Annotated[int, Field(ge=MEASURED)] = 5
    """Steps between two decisions; the last three of them are measured."""
    least_gain: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Nothing moves unless a step is predicted to become shorter by this fraction."""
    most: Annotated[float, Field(gt=1)] = 2.0
    """The largest share of a rank along an axis, in multiples of an equal one: its memory grows with it."""


class RunConfig(Section):
    """A run: the whole file."""

    batch: Count = 32
    """Global batch: samples of one step, over all ranks."""
    accumulate: Count = 1
    """Parts of a batch that are computed one after the other to save memory; it must divide `batch`."""
    epochs: CountOrNone = 10
    """Passes over the training data."""
    steps: CountOrNone = 0
    """Stop after this many steps, whatever `epochs` says; 0 follows `epochs`."""
    precision: Precision = "fp32"
    """fp32 and fp64 throughout; bf16 and fp16, or amp-bf16 and amp-fp16, by autocast, fp16 with gradient scaling."""
    loss: str = "auto"
    """cross_entropy, mse, l1, huber, dice, dice+cross_entropy, package.module:function, or auto, by the target."""
    clip_norm: Amount = 0.0
    """Clip the norm of all gradients together to this; 0 does not clip."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of weights, sample order, augmentation and dropout."""
    sync: Literal["step", "async"] = "step"
    """step: ranks sum gradients in every step; async: each trains on its own and hands in its weights now and then."""
    sync_every: Count = 4
    """For async: steps that a rank makes before it hands in its weights."""
    compile: Compile = False
    """true traces and compiles the whole step where it can; "max-autotune" tries more kernels, "eager" only replays."""
    timeout_seconds: Positive = 600.0
    """How long ranks may be silent, or wait for each other, before the run fails or restarts; longer than any step."""
    tensorboard: bool = False
    """Whether to write TensorBoard's files too, to `tensorboard/` in the run folder."""
    profile_steps: CountOrNone = 0
    """Steps to profile, after the first few; see `convmesh profile`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    balance: BalanceConfig = BalanceConfig()
