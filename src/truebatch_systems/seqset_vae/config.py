"""Settings of seqset_vae: which stays, how large the model is, what is learned, and when the detector speaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from truebatch.config.checks import check_choice, check_range
from truebatch.errors import ConfigError
from truebatch.training.config import TrainConfig

GENERATED, NAFLD = "generated", "nafld"
NO_LABELS = Path("none")
Mode = Literal["joint", "pretrain", "finetune"]
Head = Literal["attention", "gaussian_mil"]
ClassLoss = Literal["cross_entropy", "weighted", "focal"]
Reduction = Literal["stay", "set"]
Action = Literal["warn", "checkpoint", "anneal", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnConfig:
    """What the columns of a long table, or of the files of a folder, are called."""

    patient: str = "patient"
    """Long tables: whose event it is."""
    time: str = "minute"
    """When: hh:mm or a number of `unit_minutes` since admission, or a date or timestamp, counted from the first event."""
    variable: str = "variable"
    value: str = "value"
    set_index: str = "set_index"
    """Which set an event belongs to; without this column all events of one time are a set."""
    label: str = "in_hospital_mortality"
    """The class, in the label file or in the long table itself."""
    label_patient: str = "ts_id"
    """Whose label it is, in the label file."""
    unit_minutes: float = 1.0
    """Minutes of one unit of `time`: 60 for hours, 1440 for days."""

    def __post_init__(self) -> None:
        check_range(self, "unit_minutes", above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorConfig:
    """The embedded stays: seeded, with a risk that can be learned from the events."""

    stays: int = 1200
    seed: int = 0
    positives: float = 0.10
    """Share of stays with label 1."""
    signal: float = 3.0
    """How strongly the severity at the end decides the label; 0 makes it a coin."""
    shuffled: bool = False
    """Deal the labels out at random: the control in which nothing can be learned."""
    fixed_hours: float | None = None
    """Every stay this long; by default log-normal around two days."""
    median_hours: float = 48.0
    num_variables: int = 131

    def __post_init__(self) -> None:
        check_range(self, "stays", "num_variables", "median_hours", above=0)
        check_range(self, "seed", "signal")
        check_range(self, "positives", above=0, below=1)
        if self.fixed_hours is not None:
            check_range(self, "fixed_hours", above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and parts of the model."""

    embedding_dim: int = 768
    """Width of a variable's vector where no embedding file gives it."""
    reduced_dim: int = 256
    latent_dim: int = 256
    levels: int = 2
    """Latent levels of the set encoder; the deepest goes on to the sequence."""
    heads: int = 2
    inducing_points: int = 16
    transformer_layers: int = 2
    transformer_heads: int = 2
    feedforward_dim: int = 256
    dropout: float = 0.1
    head: Head = "attention"
    """How a stay is classified: pooled by attention, or every set judged by two Gaussians (gaussian_mil)."""
    votes: bool = False
    """Beside the head, let every event of the newest set vote for the classes itself: a logistic regression on the last
    values. For few stays with many variables, and best with carry_minutes and carry_counts, or with summarise."""
    vote_curves: bool = False
    """With votes: a curve for every variable instead of a straight line, so that both too low and too high can count."""
    num_classes: int = 2
    seed_noise: float = 0.3
    """How much noise the decoder's seeds get in training."""
    logvar_limit: float = 10.0
    """Log variances are clamped to plus and minus this."""

    def __post_init__(self) -> None:
        names = ("embedding_dim", "reduced_dim", "latent_dim", "levels", "heads", "inducing_points")
        check_range(self, *names, "transformer_layers", "transformer_heads", "feedforward_dim", above=0)
        check_range(self, "num_classes", above=1)
        check_range(self, "dropout", below=1)
        check_range(self, "seed_noise", "logvar_limit")
        check_choice(self, "head", Head)
        if self.vote_curves and not self.votes:
            raise ConfigError(
                "curves are those of votes", seen="votes=False, vote_curves=True", do="set model.votes=true as well"
            )
        for name in ("heads", "transformer_heads"):
            if self.latent_dim % getattr(self, name):
                raise ConfigError(
                    f"latent_dim must be a multiple of {name}",
                    seen=f"latent_dim={self.latent_dim}, {name}={getattr(self, name)}",
                    do="choose them so that one divides the other",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Terms of the loss. Schedules count stays seen, so that no batch size changes them."""

    classify: ClassLoss = "cross_entropy"
    class_weight: float = 1.0
    """Of the class term, once warmed up."""
    class_warmup: int = 5000
    """Stays until the class term has its full weight."""
    label_smoothing: float = 0.1
    focal_gamma: float = 3.0
    focal_alpha: float = 0.35
    recon_weight: float = 1.0
    recon_floor: float = 0.5
    """What the weight of reconstruction falls to."""
    recon_decay: int = 10_000
    """Stays over which it falls."""
    beta: float = 0.1
    """Of the KL term, once warmed up."""
    beta_warmup: int = 5000
    """Stays until beta is reached."""
    free_bits: float = 0.1
    """Nats of KL each dimension of a set has for nothing."""
    reduction: Reduction = "stay"
    """Sets are averaged within their stay first (stay), or all sets of a step count alike (set)."""

    def __post_init__(self) -> None:
        check_choice(self, "classify", ClassLoss)
        check_choice(self, "reduction", Reduction)
        check_range(self, "class_weight", "focal_gamma", "recon_weight", "beta", "free_bits")
        check_range(self, "class_warmup", "recon_decay", "beta_warmup")
        check_range(self, "label_smoothing", "focal_alpha", "recon_floor", most=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorConfig:
    """When the posterior is called collapsed, and what is done then."""

    enabled: bool = True
    check_frequency: int = 50
    """Steps between two checks. The end of a run is checked as well."""
    grace_share: float = 0.1
    """No alarm in this share of the run, nor while beta is rising, but half of the run at most. The end is always judged."""
    window: int = 512
    """Sets a check looks back on."""
    kl_threshold: float = 0.01
    """Mean KL of a dimension below this: it says nothing."""
    mean_threshold: float = 0.02
    """Mean size of the posterior mean below this."""
    variance_threshold: float = 0.05
    """Posterior variance nearer to 1 than this."""
    active_threshold: float = 0.01
    """Variance of the posterior mean over sets above this: the unit is active."""
    active_share: float = 0.1
    """A level with fewer active units than this share: next to nothing of the input is in its latents."""
    collapsed_share: float = 0.9
    """A level with collapsed dimensions from this share on: collapse."""
    min_information: float = 0.1
    """Fewer nats than this between a set and the latents of a level: they say nothing of it."""
    max_kl: float = 50.0
    """More nats of KL than this for a dimension of a level, on average: the posterior explodes."""
    min_gap: float = 0.01
    """Latents of other sets must make reconstruction worse by this share, or the decoder does not use them; 0: not judged."""
    sharp_variance: float = 1e-3
    """Mean posterior variance below this: too sharp, which is another fault."""
    enter: int = 3
    """Bad checks in a row before the alarm."""
    leave: int = 2
    """Good checks in a row before it ends."""
    action: Action = "warn"
    anneal_factor: float = 0.5
    """anneal: beta is multiplied by this at every bad check of an alarm, free bits are divided by it."""

    def __post_init__(self) -> None:
        check_choice(self, "action", Action)
        check_range(self, "check_frequency", "window", "enter", "leave", above=0)
        check_range(self, "kl_threshold", "mean_threshold", "variance_threshold", "active_threshold", "sharp_variance")
        check_range(self, "active_share", "collapsed_share", "grace_share", most=1)
        check_range(self, "min_information", "min_gap")
        check_range(self, "max_kl", above=0)
        check_range(self, "anneal_factor", above=0, below=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqSetTrainConfig(TrainConfig):
    """Settings of a training run, with the defaults of seqset_vae."""

    epochs: int = 10
    samples_per_step: int | None = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = 0.5
    patience: int | None = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqSetConfig:
    """Stays, model, loss and detector of one run."""

    data: str = GENERATED
    """`generated`, `nafld`, a folder (patient_ehr/, MEDS, OMOP tables, PhysioNet 2012), or a long table (.csv, .tsv,
    .parquet; .gz)."""
    labels: Path | None = None
    """The label file; by default oc.csv beside patient_ehr/, the only task of a MEDS folder, or Outcomes-a.txt;
    `none` for no labels."""
    embeddings: Path | None = None
    """Vectors of the variables; by default cached.csv beside patient_ehr/, else drawn from the names."""
    statistics: Path | None = None
    """Mean and standard deviation of every variable; by default stats.csv, else from the training stays."""
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    max_events: int | None = None
    """Most events of a stay: the most recent whole sets are kept (the original script's max_sequence_length)."""
    max_sets: int | None = None
    """Most sets of a stay: the most recent are kept."""
    first_hours: float | None = None
    """Only events of the first hours: what is known at that time."""
    last_hours: float | None = None
    """Only events of the last hours of what is left."""
    use_dynamic_padding: bool = True
    """False pads every stay to max_events, or to the longest stay of the data: more cells, the same results."""
    clip: float | None = 10.0
    """Values farther from the mean than so many deviations are cut to that limit, and counted."""
    carry_minutes: float | None = None
    """Carry the last value of every variable forward for so long; by default not at all."""
    always_carry: tuple[str, ...] = ()
    """Variables whose last value is carried however old it is."""
    carry_counts: bool = False
    """With carry_minutes: beside every value, how often its variable was charted so far, sets cut away included."""
    summarise: bool = False
    """One more set at the end of every stay: of each variable how often it was charted, and its last, mean, lowest and
    highest value. With model.votes, these also vote for the class themselves."""
    drop_faulty: bool = False
    """Leave out events with an unknown variable or without a finite value, and count them; by default they stop the run."""
    strict: bool = False
    """Stop at faults that are otherwise corrected and counted, too."""
    validation_share: float = 0.1
    """Of the stays, where the data has no split of its own."""
    test_share: float = 0.2
    split_seed: int = 0
    cut_hours: tuple[float, ...] = (24.0, 48.0)
    """evaluate: also judge what was known after so many hours, of stays that lasted longer."""
    mode: Mode = "joint"
    """Everything at once; without labels (pretrain); or the classifier on trained latents (finetune)."""
    init_from: Path | None = None
    """A run folder or weights file to begin with."""
    freeze: bool = True
    """finetune: leave the encoder as it is."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    train: SeqSetTrainConfig = field(default_factory=SeqSetTrainConfig)

    def __post_init__(self) -> None:
        check_choice(self, "mode", Mode)
        for name in ("max_events", "max_sets", "first_hours", "last_hours", "carry_minutes", "clip"):
            if getattr(self, name) is not None:
                check_range(self, name, above=0)
        check_range(self, "validation_share", "test_share", below=1)
        check_range(self, "split_seed")
        _check_cuts(self.cut_hours)
        if self.validation_share + self.test_share >= 1:
            raise ConfigError(
                "no stays would be left to train on",
                seen=f"validation_share={self.validation_share}, test_share={self.test_share}",
                do="make the two shares less than 1 together",
            )
        if self.carry_counts and self.carry_minutes is None:
            raise ConfigError(
                "counts are carried beside values only",
                seen="carry_counts=True, carry_minutes=None",
                do="set carry_minutes, for example 60, or leave carry_counts out",
            )


def _check_cuts(hours: tuple[float, ...]) -> None:
    if not all(math.isfinite(hour) and hour > 0 for hour in hours):
        raise ConfigError(
            "cut_hours must be more than 0", seen=f"cut_hours={hours}", do="for example cut_hours=[24, 48]"
        )
