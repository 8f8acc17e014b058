"""Preference and reinforcement learning with TRL, its prompts shared: `class MyDPO(SharedPromptMixin, DPOTrainer)`.

The trainer makes its batches, generates and computes its loss; its passes over the model are packed, without padding,
and what rows begin with in common is computed once. A whole step may be one batch: more cells than fit are computed
again in backward, so memory does not decide what a mean runs over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from truebatch.adapters.deepspeed import Refusal
from truebatch.adapters.shared_backbone import SharedBackbone, SharedPrompts, share_prompts
from truebatch.adapters.trl_oom import StepInputs, run_again_in_smaller_rows, step_inputs
from truebatch.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

WHOLE = (
    "set per_device_train_batch_size to the samples of a step and gradient_accumulation_steps=1, on one device; "
    "SharedPrompts(cells=...) bounds the memory"
)
SUPPORTED = ("DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


class SharedPromptMixin(_Trainer):  # type: ignore[misc]
    """Put it before TRL's DPO, KTO, ORPO, CPO, Reward, GRPO or RLOO trainer, then use it as before.

    A step that runs out of memory, in one process, is run again in smaller packed rows: see `adapters.trl_oom`.
    Losses are TRL's own. Those that are a mean over whatever a micro-batch holds are refused with more than one
    micro-batch in a step: `refuse_cuts` names them.
    """

    def __init__(self, *args: Any, truebatch: SharedPrompts | None = None, **kwargs: Any) -> None:
        self._begun: StepInputs | None = None
        self._is_in_step = False
        super().__init__(*args, **kwargs)
        refuse_cuts(self)
        models = [one for one in (self.model, getattr(self, "ref_model", None)) if one is not None]
        self._backbones: list[SharedBackbone] = [
            share_prompts(self.accelerator.unwrap_model(one), truebatch) for one in models
        ]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Like the trainer's own; refuses what would depend on how a step is cut."""
        refuse_cuts(self)
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's own, run again in smaller rows where memory runs out; its answers are generated once."""

        def run() -> Tensor:
            loss: Tensor = super(SharedPromptMixin, self).training_step(*args, **kwargs)
            return loss

        self._begun, self._is_in_step = None, True
        try:
            return run_again_in_smaller_rows(self, self._backbones, run, lambda: self._begun)
        finally:
            self._begun, self._is_in_step = None, False

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not self._is_in_step:
            return super()._prepare_inputs(inputs)
        if self._begun is None:
            self._begun = step_inputs(self, super()._prepare_inputs(inputs))
        given = self._begun.inputs
        return dict(given) if isinstance(given, dict) else given


def refuse_cuts(trainer: Any) -> None:
    """Raise ConfigError for the first setting whose result would depend on the micro-batches of a step."""
    for wrong, seen, do in (*_of_class(trainer), *_of_settings(trainer), *_of_means(trainer)):
        raise ConfigError(wrong, seen=seen, do=do)


def _names(trainer: Any) -> list[str]:
    return [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]


def _of_class(trainer: Any) -> Iterator[Refusal]:
    if not set(SUPPORTED) & set(_names(trainer)):
        yield (
            "this trainer is not one whose passes over the model are known",
            type(trainer).__name__,
            f"put the mixin before one of {', '.join(SUPPORTED)}",
        )


def _of_settings(trainer: Any) -> Iterator[Refusal]:
    args = trainer.args
    for name in ("padding_free", "packing", "use_liger_kernel"):
        if getattr(args, name, False):
            yield "rows would be packed twice, or their pass replaced", f"{name}=True", f"set {name}=False"
    if getattr(trainer, "aux_loss_enabled", False):
        yield (
            "the balancing loss of experts is a mean over a forward pass",
            "aux_loss_enabled=True",
            "set output_router_logits=False in the model's config",
        )
    if getattr(trainer, "_is_vlm", False) or getattr(trainer, "is_vision_dataset", False):
        yield "prompts with images are not shared", "a vision-language model", "train it without the mixin"
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, name, False):
            yield (
                "sharded parameters are gathered by hooks that this adapter does not drive",
                f"{name}=True",
                "use plain DistributedDataParallel (torchrun)",
            )


def _of_means(trainer: Any) -> Iterator[Refusal]:
    """Means over a micro-batch, where a step has several: a mean of means is not the mean of the step."""
    args, names = trainer.args, _names(trainer)
    parts = args.gradient_accumulation_steps * args.world_size
    if parts == 1:
        return
    cut = f"gradient_accumulation_steps={args.gradient_accumulation_steps}, devices={args.world_size}"
    for name, why in _coupled(trainer, names):
        yield f"{why}, so a step would depend on how it is cut", f"{name}, {cut}", WHOLE


def _coupled(trainer: Any, names: list[str]) -> Iterator[tuple[str, str]]:
    args = trainer.args
    kinds = args.loss_type if isinstance(getattr(args, "loss_type", None), list) else [getattr(args, "loss_type", None)]
    if "DPOTrainer" in names:
        for kind in set(kinds) & {"sft", "aot", "aot_unpaired"}:
            mean = "the mean over tokens" if kind == "sft" else "the order of samples"
            yield f"loss_type={kind!r}", f"{mean} is that of a micro-batch"
    if "KTOTrainer" in names and "kto" in kinds:
        yield "loss_type='kto'", "the baseline is a mean over a micro-batch"
    if "ORPOTrainer" in names or ("CPOTrainer" in names and getattr(args, "cpo_alpha", 0.0) != 0.0):
        yield "the loss of chosen answers", "its mean over tokens is that of a micro-batch"
    if "GRPOTrainer" in names and "bnpo" in kinds:
        yield "loss_type='bnpo'", "the mean over tokens is that of a micro-batch"
    if "GRPOTrainer" in names and bool(getattr(trainer, "_entropy_bonus_enabled", False)):
        yield "an entropy bonus", "its mean over tokens is that of a micro-batch"
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        yield "top_entropy_quantile", "the quantile is that of a micro-batch"
