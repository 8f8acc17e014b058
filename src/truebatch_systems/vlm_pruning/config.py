"""Settings of vlm_pruning, under the names of the original script's YAML file: backbone, method, data and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from truebatch.config.checks import check_choice, check_range
from truebatch.errors import ConfigError
from truebatch.training.config import TrainConfig
from truebatch.training.optim.lr_schedules import Shape

Stage = Literal["pruning", "backbone"]
Choice = Literal["soft", "straight_through", "top_k"]
Teacher = Literal["adversarial", "distillation", "none"]
BudgetOf = Literal["sample", "average"]
Merger = Literal["simple", "question_aware", "fixed_pooling"]
Aspect = Literal["square", "keep"]
Balance = Literal["mean", "origin"]
EvalMode = Literal["origin", "merge_only", "soft", "hard"]
AUTO = "auto"
TINY = ("tiny-llava", "tiny-llava-next", "tiny-qwen2.5-vl", "tiny-qwen3-vl")
"""Backbones with random weights that are built on the spot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MllmSettings:
    """How images and text reach the backbone."""

    enable_true_batch: bool = True
    """False runs one sample at a time, with the same results: the way back."""
    unified_image_size: int | Literal["auto"] | None = None
    """Pixels of a side of every image; `auto` picks one of `image_sizes` for each image by its content; None is the size
    the vision tower was made for (LLaVA-1.5), or that of the image. Other sizes get other numbers of vision tokens."""
    image_sizes: tuple[int, ...] = (224, 336, 448)
    """What `auto` picks from."""
    image_token_budget: int | None = None
    """auto: most vision tokens of an image; None is no limit beside the largest size."""
    image_detail: float = 0.27
    """auto: the share of an image's variation (root mean square) that a smaller size may lose. Lower is larger sizes."""
    image_aspect: Aspect = "square"
    """Stretch every image to a square, or keep its aspect with about as many tokens."""
    image_max_size: int | None = None
    """Longest side of an image before anything else is done to it; larger ones are shrunk."""
    max_text_tokens: int | None = None
    """Longest prompt in text tokens; a longer one is refused by name. None takes any."""

    def __post_init__(self) -> None:
        size = self.unified_image_size
        if size != AUTO and size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(
                "unified_image_size must be a number of pixels or 'auto'",
                seen=f"unified_image_size={size!r}",
                do="set for example 336, or auto",
            )
        if not self.image_sizes or min(self.image_sizes) < 1:
            raise ConfigError(
                "auto needs sizes to pick from", seen=f"image_sizes={self.image_sizes}", do="for example [224, 336]"
            )
        for name in ("image_token_budget", "image_max_size", "max_text_tokens"):
            if getattr(self, name) is not None:
                check_range(self, name, above=0)
        check_range(self, "image_detail", most=1)
        check_choice(self, "image_aspect", Aspect)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneSettings:
    """The frozen model whose vision tokens are pruned."""

    name: str = "tiny-llava"
    """A folder with weights of LLaVA-1.5, LLaVA-NeXT, Qwen2.5-VL or Qwen3-VL, or one of the tiny ones with random
    weights: tiny-llava, tiny-llava-next, tiny-qwen2.5-vl, tiny-qwen3-vl."""
    seed: int = 0
    """Of the random weights of a tiny one."""
    prompt: str | None = None
    """The text around a question, with {images} and {question}; by default that of the backbone's family."""
    mllm_settings: MllmSettings = field(default_factory=MllmSettings)

    def __post_init__(self) -> None:
        check_range(self, "seed")
        if self.prompt is not None and ("{images}" not in self.prompt or "{question}" not in self.prompt):
            raise ConfigError(
                "a prompt must say where images and question stand",
                seen=f"prompt={self.prompt!r}",
                do="for example 'USER: {images}\\n{question}\\nASSISTANT:'",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSettings:
    """What is learned, from which losses, with which schedules."""

    stage: Stage = "pruning"
    """pruning: the backbone is frozen and heads learn what to drop. backbone: the whole model learns to answer first."""
    pruning_layers: tuple[int, ...] = ()
    """Decoder layers after which vision tokens may go; empty is [5, 10, 15, 20] of 32, in proportion."""
    pruner_d_internal: int = 512
    pruner_num_heads: int = 4
    pruner_dropout: float = 0.1
    use_attn_residual: bool = False
    """Add how much the question looks at a token to its logit."""
    attn_residual_weight: float = 0.5
    learnable_attn_weight: bool = False
    initial_keep: float = 0.0
    """Bias of a pruner's logit at the start: 0 keeps half, larger keeps more."""
    enable_token_merger: bool = False
    """Merge vision tokens before the projector (LLaVA-1.5) or behind it (the others)."""
    merger_type: Merger = "fixed_pooling"
    merge_ratio: float = 0.5
    """Share of vision tokens left by the merger."""
    choice: Choice = "soft"
    """soft: masks between 0 and 1; straight_through: 0 or 1 forward, soft backward; top_k: the budget met exactly.
    The last two run the layers behind the first pruner once more, for gradients of tokens that are dropped."""
    residual_scale: bool = False
    """As in the original script: masks multiply the states of vision tokens, not their weight as keys. It hardly masks,
    since every layer begins with a norm; for comparisons with old runs, with choice=soft only."""
    use_gumbel: bool = True
    """Noise on the logits in training."""
    use_token_num_target: bool = True
    target_token_num: int | None = None
    """Budget: average vision tokens a decoder layer sees, per sample. None: 200."""
    target_sparsity: float | None = None
    """Budget where use_token_num_target is off: the share of vision tokens that an average layer does not see. None: 0.7."""
    budget_of: BudgetOf = "sample"
    """sample: every sample is held to the budget, and what it spends beside it costs sparsity_weight times the square.
    average: samples may differ; a vision token has a price, the same for all, that rises while an average sample would
    be left more than the budget in use and falls while it would be left less. It begins with sparsity_weight."""
    price_learning_rate: float = 0.1
    """budget_of=average: how fast the logarithm of the price follows; the same from the first step to the last."""
    sparsity_loss_only_on_excess: bool = True
    """budget_of=sample, one-sided: spending less than the budget costs nothing."""
    sparsity_weight: float = 9.0
    sparsity_weight_max: float | None = None
    """With a warm-up: the weight at its end."""
    sparsity_warmup_ratio: float = 0.0
    """Share of the run in which the weight rises from sparsity_weight to sparsity_weight_max."""
    token_count_loss_weight: float = 0.0
    binarization_loss_weight: float = 1.0
    temperature: float = 0.4
    temperature_min: float = 0.15
    temperature_anneal_rate: float = 0.5
    """Share of the run in which the temperature falls."""
    hard_pruning_threshold: float = 0.5
    teacher: Teacher = "adversarial"
    """What the unpruned model teaches: a discriminator that tells the two apart, its answers' distribution, nothing."""
    disc_num_layers: int = 3
    """How many layers the discriminator sees."""
    disc_d_d: int = 512
    disc_dropout: float = 0.1
    disc_noise_scale_start: float = 0.05
    disc_noise_scale_end: float = 0.01
    disc_noise_scale: float = 0.0
    """After pooling."""
    disc_pool_start_weight: float = 0.3
    disc_pool_end_weight: float = 1.0
    disc_target_layers: tuple[int, ...] = ()
    """Indices into the hidden states (embeddings first, the last one normed) that the discriminator sees; empty is
    [-2, -5, -8] of 32 layers, in proportion."""
    disc_reinit_prob: float = 0.0
    """Chance before each step that the discriminator and its optimiser begin anew."""
    disc_learning_rate: float = 6e-4
    merger_learning_rate: float = 1e-5
    task_loss_weight_start: float | None = 60.0
    task_loss_weight: float = 40.0
    adv_loss_weight_start: float | None = 10.0
    adv_loss_weight: float = 40.0
    distillation_weight: float = 10.0
    distillation_temperature: float = 1.0
    loss_weight_warmup_ratio: float = 0.3
    """Share of the run in which task and adversarial weights go from their start to their end."""

    def __post_init__(self) -> None:
        for name, choices in (("stage", Stage), ("merger_type", Merger), ("choice", Choice), ("teacher", Teacher)):
            check_choice(self, name, choices)
        _check_layers(self)
        _check_price(self)
        check_range(self, "pruner_d_internal", "pruner_num_heads", "disc_d_d", above=0)
        _check_target(self)
        check_range(self, "temperature", "temperature_min", "distillation_temperature", above=0)
        check_range(self, "merge_ratio", above=0, most=1)
        check_range(self, "pruner_dropout", "disc_dropout", below=1)
        check_range(self, "hard_pruning_threshold", below=1)
        shares = ("sparsity_warmup_ratio", "temperature_anneal_rate", "loss_weight_warmup_ratio", "disc_reinit_prob")
        check_range(self, *shares, most=1)
        weights = ("sparsity_weight", "token_count_loss_weight", "binarization_loss_weight", "task_loss_weight")
        check_range(self, *weights, "adv_loss_weight", "distillation_weight", "attn_residual_weight")
        check_range(self, "disc_learning_rate", "merger_learning_rate", "disc_noise_scale")
        check_range(self, "disc_noise_scale_start", "disc_noise_scale_end")
        check_range(self, "disc_pool_start_weight", "disc_pool_end_weight", above=0)
        if self.residual_scale and self.choice != "soft":
            raise ConfigError(
                "residual_scale knows soft masks only: a state times 0 is still a key",
                seen=f"residual_scale=True, choice={self.choice}",
                do="set choice to soft, or leave residual_scale out",
            )
        if self.temperature_min > self.temperature:
            raise ConfigError(
                "the temperature can only fall",
                seen=f"temperature={self.temperature}, temperature_min={self.temperature_min}",
                do="set temperature_min to temperature or less",
            )
        if self.disc_target_layers and len(self.disc_target_layers) != self.disc_num_layers:
            raise ConfigError(
                "disc_num_layers says how many layers the discriminator sees",
                seen=f"disc_num_layers={self.disc_num_layers}, disc_target_layers={self.disc_target_layers}",
                do="name as many disc_target_layers",
            )

    @property
    def token_budget(self) -> int:
        """Vision tokens that an average layer sees, where use_token_num_target is on."""
        return 200 if self.target_token_num is None else self.target_token_num

    @property
    def kept_share(self) -> float:
        """Share of vision tokens that an average layer sees, where use_token_num_target is off."""
        return 1 - (0.7 if self.target_sparsity is None else self.target_sparsity)

    def for_depth(self, num_layers: int) -> MethodSettings:
        """These settings with layers that were left open named for a decoder of so many layers."""
        pruning = sorted({round(share * num_layers / 32) for share in (5, 10, 15, 20)})
        judged = range(self.disc_num_layers)
        return replace(
            self,
            pruning_layers=self.pruning_layers or tuple(at for at in pruning if at < num_layers - 1) or (0,),
            disc_target_layers=self.disc_target_layers
            or tuple(-max(at + 1, round((2 + 3 * at) * num_layers / 32)) for at in judged),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryPriority:
    """Which samples are taken where fewer are asked for than there are."""

    enable: bool = False
    """Off takes any of them, drawn from the seed."""
    mode: Balance = "mean"
    """mean: categories in turn, so that each has equally many as long as it lasts; origin: each has its share of all."""

    def __post_init__(self) -> None:
        check_choice(self, "mode", Balance)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSettings:
    """Images with questions."""

    name: str = "shapes"
    """`shapes` or `mixed_shapes` (made pictures), `random` (noise, for trials), a .jsonl file, a .json file as LLaVA has it
    (`image`, `conversations`), a folder of images (CLASS/picture.jpg), or a known dataset under `root`."""
    root: Path | None = None
    """Where the files of a known dataset lie."""
    seed: int = 0
    train: int | None = None
    """Samples to train on; None takes all there are."""
    validation: int | None = None
    test: int | None = None
    category_priority: CategoryPriority = field(default_factory=CategoryPriority)
    """Made shapes have all categories equally often in any case."""

    def __post_init__(self) -> None:
        check_range(self, "seed")
        for name in ("train", "validation", "test"):
            if getattr(self, name) is not None:
                check_range(self, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What `evaluate` runs."""

    eval_mode: tuple[EvalMode, ...] = ("origin", "hard")
    max_new_tokens: int = 20
    eval_max_samples: int | None = None
    """The first so many samples, always the same; None takes all."""
    pictures: int = 6
    """`show`: samples whose kept tokens are drawn."""
    curve_budgets: tuple[float, ...] = (0.2, 0.25, 0.3, 0.4, 0.6, 1.0)
    """`show`: shares of vision tokens at which the trained heads and untrained ways are compared."""

    def __post_init__(self) -> None:
        check_range(self, "max_new_tokens", above=0)
        check_range(self, "pictures")
        if not all(0 < budget <= 1 for budget in self.curve_budgets):
            raise ConfigError(
                "a budget is a share of the vision tokens", seen=f"curve_budgets={self.curve_budgets}", do="from 0 to 1"
            )
        unknown = [mode for mode in self.eval_mode if mode not in get_args(EvalMode)]
        if unknown or not self.eval_mode:
            raise ConfigError(
                "eval_mode is not known", seen=f"eval_mode={self.eval_mode}", do=f"use some of {get_args(EvalMode)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningTrain(TrainConfig):
    """Settings of a training run, with the defaults of vlm_pruning."""

    samples_per_step: int | None = 10
    learning_rate: float = 1e-4
    """Of the pruner heads; the discriminator and the merger have their own."""
    schedule: Shape = "cosine"
    min_learning_rate: float = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningConfig:
    """Backbone, method, data and evaluation of one run."""

    backbone_settings: BackboneSettings = field(default_factory=BackboneSettings)
    method_settings: MethodSettings = field(default_factory=MethodSettings)
    dataset_settings: DatasetSettings = field(default_factory=DatasetSettings)
    evaluation_settings: EvaluationSettings = field(default_factory=EvaluationSettings)
    train: PruningTrain = field(default_factory=PruningTrain)


def _check_layers(config: MethodSettings) -> None:
    layers = config.pruning_layers
    if layers and (min(layers) < 0 or list(layers) != sorted(set(layers))):
        raise ConfigError(
            "pruning_layers must be layer numbers in rising order",
            seen=f"pruning_layers={layers}",
            do="for example [5, 10, 15, 20]",
        )


def _check_target(config: MethodSettings) -> None:
    """One budget: the other setting would be ignored."""
    if config.target_token_num is not None:
        check_range(config, "target_token_num", above=0)
    if config.target_sparsity is not None:
        check_range(config, "target_sparsity", below=1)
    if config.use_token_num_target and config.target_sparsity is not None:
        raise ConfigError(
            "target_sparsity is not used while use_token_num_target is on",
            seen=f"use_token_num_target=True, target_sparsity={config.target_sparsity}",
            do="set use_token_num_target: false, or leave target_sparsity out and set target_token_num",
        )
    if not config.use_token_num_target and config.target_token_num is not None:
        raise ConfigError(
            "target_token_num is not used while use_token_num_target is off",
            seen=f"use_token_num_target=False, target_token_num={config.target_token_num}",
            do="set use_token_num_target: true, or leave target_token_num out and set target_sparsity",
        )


def _check_price(config: MethodSettings) -> None:
    check_choice(config, "budget_of", BudgetOf)
    if config.budget_of == "sample":
        return
    check_range(config, "sparsity_weight", "price_learning_rate", above=0)
    if config.choice == "top_k":
        raise ConfigError(
            "top_k keeps the budget in every sample, so that a price for all would do nothing",
            seen="budget_of=average, choice=top_k",
            do="set budget_of to sample, or choice to straight_through or soft",
        )
    if config.sparsity_weight_max is not None:
        raise ConfigError(
            "a price that follows the budget has no schedule of its own",
            seen=f"budget_of=average, sparsity_weight_max={config.sparsity_weight_max}",
            do="leave sparsity_weight_max out, or set budget_of to sample",
        )
