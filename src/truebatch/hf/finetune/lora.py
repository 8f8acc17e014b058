"""LoRA through peft: small matrices beside the frozen linear layers are trained; they are saved alone, or added in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.hf.hub import hub_base
from truebatch.io.atomic_files import read_json, write_json
from truebatch.progress import stage

_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "seq2seq": "SEQ_2_SEQ_LM",
    "dpo": "CAUSAL_LM",
    "reward": "SEQ_CLS",
    "embedding": "FEATURE_EXTRACTION",
    "vlm": "CAUSAL_LM",
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


def add_lora(model: nn.Module, task: str, *, rank: int, alpha: float, targets: str = "all-linear") -> None:
    """Freeze the model and put adapters beside all its linear layers, or those whose names a pattern fits, in place; its
    class stays what it is."""
    peft = check_peft()
    heads = [name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=targets,
        modules_to_save=heads if _TASKS[task].endswith("_CLS") and heads else None,
        task_type=_TASKS[task],
    )
    adapted: Any = model
    adapted.add_adapter(settings)


def name_base(folder: Path, base: Path) -> None:
    """Write the base into a saved adapter as it is found from anywhere: its folder in full, or its name of the Hub."""
    file = folder / "adapter_config.json"
    name, revision = hub_base(base)
    write_json(file, read_json(file) | {"base_model_name_or_path": name, "revision": revision})


@torch.no_grad()
@stage("merging the adapter into the weights")
def merge_into(base: nn.Module, adapted: nn.Module) -> None:
    """Give a plain model the weights of the adapted one, with what every adapter adds; `adapted` stays as it is.

    The weights of a base of four bits are those it was trained beside, dequantised.
    """
    weights = {name: value for name, value in adapted.state_dict().items() if not _is_of_adapter(name)}
    weights |= dict(_adapted_weights(adapted))
    base.load_state_dict({name: weights[name] for name in base.state_dict()})


def _is_of_adapter(name: str) -> bool:
    return any(part in name for part in (".base_layer.", ".lora_", ".original_module.", ".modules_to_save."))


def _adapted_weights(adapted: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Merged weights of the layers that have an adapter, and those that were trained whole, by their plain names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.integrations import dequantize_module_weight

    for name, module in adapted.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            plain = layer.get_base_layer()
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            yield f"{name}.weight", dequantize_module_weight(plain).to(delta.dtype) + delta
            if plain.bias is not None:
                yield f"{name}.bias", plain.bias
        elif isinstance(module, ModulesToSaveWrapper):
            wrapper: Any = module
            whole = wrapper.modules_to_save[wrapper.active_adapters[0]]
            yield from ((f"{name}.{inner}", value) for inner, value in whole.state_dict().items())
