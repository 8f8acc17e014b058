"""Checks for settings: a number within limits, a value among choices; and names of settings in other programs."""

from __future__ import annotations

import math
from typing import Any, get_args

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest

FOREIGN = {
    "num_train_epochs": "epochs", "max_epochs": "epochs", "num_epochs": "epochs", "n_epochs": "epochs",
    "lr": "learning_rate", "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size",
    "micro_batch_size": "batch_size", "global_batch_size": "samples_per_step",
    "accumulate_grad_batches": "gradient_accumulation_steps", "grad_accum": "gradient_accumulation_steps",
    "gradient_clip_val": "max_grad_norm", "clip_grad_norm": "max_grad_norm", "bf16": "precision", "fp16": "precision",
    "mixed_precision": "precision", "save_steps": "save_every", "save_total_limit": "keep",
    "eval_steps": "validate_every", "eval_strategy": "validate_every", "check_val_every_n_epoch": "validate_every",
    "early_stopping_patience": "patience", "lr_scheduler_type": "schedule", "warmup_ratio": "warmup_steps",
    "report_to": "track", "logger": "track", "dataloader_num_workers": "workers", "num_workers": "workers",
    "num_gpus": "devices", "n_gpu": "devices",
}  # fmt: skip
"""Names of settings in the Hugging Face Trainer, Lightning and many scripts -> their names here."""


def check_range(
    config: object, *names: str, above: float = -math.inf, below: float = math.inf, most: float = math.inf
) -> None:
    """Raise unless the values are finite, 0 or more, and within the given limits."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0 and above < value < below and value <= most):
            limits = {f"more than {above}": above, f"less than {below}": below, f"at most {most}": most}
            said = [words for words, limit in limits.items() if math.isfinite(limit)]
            raise ConfigError(
                f"{name} must be {', '.join(said) or 'a finite number of 0 or more'}",
                seen=f"{name}={value!r}",
                do=f"set {name} within these limits",
            )


def check_choice(config: object, name: str, choices: Any) -> None:
    """Raise unless the value is one of the choices of a `Literal`; the error names the nearest one."""
    value = getattr(config, name)
    if value not in get_args(choices):
        raise ConfigError(
            f"{name} is not known{nearest(str(value), list(get_args(choices)))}",
            seen=f"{name}={value!r}",
            do=f"use one of: {', '.join(get_args(choices))}",
        )
