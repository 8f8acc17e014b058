"""Find Hugging Face Trainer settings that planned steps would not honour, before training begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from truebatch.adapters.deepspeed import Refusal, deepspeed_refusals
from truebatch.errors import ConfigError

STANDARD_LOSS = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}
"""(module, class) whose loss is the mean of the head's own cross entropy: what the exact sums replace."""
STANDARD_STEP = STANDARD_LOSS
"""(module, class) whose training step does only forward and backward, with the settings accepted below."""

FUSED_UPDATES = ("lomo", "adalomo", "layerwise")
"""Optimisers that update inside backward, before the step is complete."""


def refuse_settings(trainer: Any, mixin: type) -> None:
    """Raise ConfigError for the first setting that would be ignored, or would change what a step is."""
    for wrong, seen, do in (*_of_loss(trainer, mixin), *_of_data(trainer), *_of_devices(trainer), *_of_rest(trainer)):
        raise ConfigError(wrong, seen=seen, do=do)


def _of_loss(trainer: Any, mixin: type) -> Iterator[Refusal]:
    args = trainer.args
    own = "write it as an Objective with sums and counts and train with truebatch.train, or train without the mixin"
    if getattr(trainer, "compute_loss_func", None) is not None:
        yield "a loss function that returns one number cannot be divided once", "compute_loss_func is set", own
    for method, known in (("compute_loss", STANDARD_LOSS), ("training_step", STANDARD_STEP)):
        owner = _owner_below(trainer, mixin, method)
        if owner is None or (owner.__module__, owner.__name__) not in known:
            place = "above the mixin" if owner is None else f"{owner.__module__}.{owner.__name__}"
            yield f"a custom {method} would not be called as it expects", f"{method} of {place}", own
    if args.label_smoothing_factor:
        yield (
            "label smoothing is not part of the exact sums",
            f"label_smoothing_factor={args.label_smoothing_factor}",
            "set it to 0",
        )
    if getattr(args, "loss_type", "nll") != "nll":
        yield "this loss is not part of the exact sums", f"loss_type={args.loss_type!r}", "use loss_type='nll'"
    if getattr(trainer, "aux_loss_enabled", False):
        yield (
            "the balancing loss of experts is a mean over a forward pass",
            "aux_loss_enabled=True",
            "set output_router_logits=False in the model's config",
        )


def _owner_below(trainer: Any, mixin: type, method: str) -> type | None:
    """The class whose `method` the mixin replaces; None if a class above the mixin has its own loss."""
    mro = type(trainer).__mro__
    at = mro.index(mixin)
    if method == "compute_loss" and any(method in vars(cls) for cls in mro[:at]):
        return None
    return next(cls for cls in mro[at + 1 :] if method in vars(cls))


def _of_data(trainer: Any) -> Iterator[Refusal]:
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        yield (
            "two planners cannot both choose the samples of a step",
            f"train_sampling_strategy={strategy!r}",
            "leave it at 'random': steps are drawn at random, and lengths are grouped inside each step",
        )
    if getattr(args, "group_by_length", False):
        yield (
            "two planners cannot both choose the samples of a step",
            "group_by_length=True",
            "leave it out: lengths are grouped inside each step",
        )
    if args.dataloader_drop_last:
        yield "no sample is ever dropped", "dataloader_drop_last=True", "set it to False"
    if args.auto_find_batch_size:
        yield (
            "a batch size found by trial would change what a step is",
            "auto_find_batch_size=True",
            "set it to False and limit a forward pass with AdapterConfig(cells=..., pairs=...)",
        )
    if args.ignore_data_skip:
        yield (
            "a resumed run would begin its epoch again",
            "ignore_data_skip=True",
            "set it to False: resuming costs nothing, a step is found by its number",
        )
    for name in ("packing", "padding_free", "eval_packing"):
        if getattr(args, name, False):
            yield (
                "rows would be packed twice",
                f"{name}=True",
                f"set {name}=False and use AdapterConfig(layout='packed')",
            )
    if getattr(trainer.data_collator, "seed", None) is not None:
        yield (
            "a collator with its own generator draws in loading order",
            f"{type(trainer.data_collator).__name__}(seed={trainer.data_collator.seed})",
            "omit its seed: its draws are keyed by seed, epoch and sample",
        )


def _of_devices(trainer: Any) -> Iterator[Refusal]:
    args, accelerator = trainer.args, trainer.accelerator
    if args.n_gpu > 1:
        yield "DataParallel cuts micro-batches itself", f"n_gpu={args.n_gpu}", "start one process per GPU with torchrun"
    if getattr(trainer, "is_deepspeed_enabled", False):
        yield from deepspeed_refusals(accelerator.state.deepspeed_plugin.deepspeed_config)
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield (
            "sharded parameters are reduced by their own hooks, which this adapter does not drive",
            "the model is sharded (FSDP or a DistributedConfig)",
            "use plain DistributedDataParallel (torchrun), or truebatch.train with fully_shard",
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        yield "ranks that share samples are not supported", "a parallelism_config", "leave it out"
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            yield (
                "batches are cut by the plan, not by accelerate",
                f"accelerator_config.{name}=True",
                "leave it at its default",
            )
    if args.world_size > 1 and not getattr(args, "average_tokens_across_devices", True):
        yield (
            "a mean per rank is not the mean of the step",
            "average_tokens_across_devices=False",
            "leave it at True: the loss is divided once over all ranks",
        )


def _of_rest(trainer: Any) -> Iterator[Refusal]:
    args = trainer.args
    if any(word in str(getattr(args.optim, "value", args.optim)) for word in FUSED_UPDATES):
        yield (
            "this optimiser updates inside backward, before the step is complete",
            f"optim={args.optim!s}",
            "use an optimiser that updates once per step, for example adamw_torch",
        )
    if args.neftune_noise_alpha:
        yield (
            "NEFTune's noise is drawn for the micro-batch, not for the sample",
            f"neftune_noise_alpha={args.neftune_noise_alpha}",
            "leave it out",
        )
    for name in ("use_liger_kernel", "activation_offloading", "fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            yield "this setting is not proven to leave the result unchanged", f"{name}=True", f"set {name}=False"
