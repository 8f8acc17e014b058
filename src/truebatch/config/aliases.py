"""Names of settings in other programs, and what they are called here."""

from __future__ import annotations

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
