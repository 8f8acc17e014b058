"""LoRA through peft: small matrices beside the frozen linear layers are trained, and only they are saved."""

from __future__ import annotations

from typing import Any

from torch import nn

from truebatch.errors import ConfigError

_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "seq2seq": "SEQ_2_SEQ_LM",
}
_HEADS = ("score", "classifier", "classification_head", "pre_classifier")
"""Heads of classifiers: new, and therefore trained whole."""


def check_peft() -> Any:
    """The package peft; `ConfigError` with the command to install it where it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "--lora needs the package peft", seen=str(error), do="pip install 'truebatch[peft]'"
        ) from error
    return peft


def add_lora(model: nn.Module, task: str, *, rank: int, alpha: float) -> None:
    """Freeze the model and put adapters beside all its linear layers, in place; its class stays what it is."""
    peft = check_peft()
    heads = [name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        modules_to_save=heads if task.endswith("classification") and heads else None,
        task_type=_TASKS[task],
    )
    adapted: Any = model
    adapted.add_adapter(settings)
