"""The Hugging Face Trainer for stitched models: planned steps, the exact loss, and checkpoints of the adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Trainer

from truebatch.adapters.trainer import TruebatchMixin
from truebatch.errors import CheckpointError
from truebatch_systems.stitched_llm.model.save_load import WEIGHTS, save_adapter

ARGUMENTS = "training_args.bin"


class StitchedTrainer(TruebatchMixin, Trainer):  # type: ignore[misc]
    """`Trainer` as everybody uses it; `checkpoint-N` holds what was trained, not the donors."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if not self.args.should_save:
            return
        save_adapter(self.accelerator.unwrap_model(self.model), folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / ARGUMENTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        file = Path(resume_from_checkpoint) / WEIGHTS
        if not file.is_file():
            raise CheckpointError(
                f"{resume_from_checkpoint} holds no adapter", seen=f"no {WEIGHTS} in it", do="name another checkpoint"
            )
        places = dict((model or self.model).named_parameters())
        with torch.no_grad():
            for name, value in load_file(file).items():
                places[name].copy_(value)
