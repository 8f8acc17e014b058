"""The trained model, or its adapter, in the files that transformers and peft load."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.lora import merge_into, name_base
from truebatch.hf.pretrained import load_weights, with_dropout, without_chatter


def export_model(
    config: FinetuneConfig, configuration: Any, model: nn.Module, folder: Path, *,
    dropouts: Mapping[str, float], with_configuration: bool,
) -> None:  # fmt: skip
    """Write the model, an adapter merged into it if that is asked for, or the adapter alone.

    `dropouts` are those the model came with. `with_configuration`: the folder of the base does not know all that this
    configuration says, so an adapter gets it too.
    """
    saved: Any = model
    if config.merge_lora:
        saved, _ = load_weights(config.model, deepcopy(configuration), config.task, seed=config.train.seed)
        merge_into(saved, model)
    with_dropout(saved.config, dropouts)
    is_adapter = config.lora and not config.merge_lora
    with without_chatter():
        saved.save_pretrained(folder)
        if is_adapter and with_configuration:
            saved.config.save_pretrained(folder)
    if is_adapter:
        name_base(folder, config.model)
