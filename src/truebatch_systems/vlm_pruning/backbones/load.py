"""Backbones from local folders or tiny ones with random weights: what reads samples, and the frozen model itself."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn

from truebatch.errors import ConfigError
from truebatch.hf.load import load_part, load_weights_of
from truebatch.hf.pretrained import load_configuration, load_tokenizer, without_dropout
from truebatch.io.text_encoding import nearest
from truebatch_systems.vlm_pruning.backbones.families import family_of
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader
from truebatch_systems.vlm_pruning.backbones.tiny import tiny_config, tiny_model, tiny_tokenizer
from truebatch_systems.vlm_pruning.config import TINY, BackboneSettings, MethodSettings
from truebatch_systems.vlm_pruning.data.encode import SampleEncoder
from truebatch_systems.vlm_pruning.data.image_size import check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@lru_cache(maxsize=4)
def open_encoder(settings: BackboneSettings, *, merge_ratio: float | None = None) -> SampleEncoder:
    """What reads samples for a backbone; no weights are loaded."""
    is_tiny = settings.name in TINY
    if not is_tiny and not Path(settings.name).is_dir():
        raise ConfigError(
            f"the backbone is neither a folder nor a tiny one{nearest(settings.name, list(TINY))}",
            seen=f"name={settings.name!r}",
            do=f"give the folder of a model (nothing is downloaded), or one of {', '.join(TINY)}",
        )
    config = tiny_config(settings.name) if is_tiny else load_configuration(Path(settings.name))
    tokenizer = tiny_tokenizer() if is_tiny else load_tokenizer(Path(settings.name), None)
    family = family_of(config)
    reader = ImageReader(config, _image_processor(settings, config), settings.mllm_settings)
    check_sizes(settings.mllm_settings, family.sizes(reader))
    return SampleEncoder(
        family=family,
        images=reader,
        tokenizer=tokenizer,
        image_id=int(getattr(config, "image_token_id", None) or config.image_token_index),
        end_id=tokenizer.eos_token_id,
        prompt=settings.prompt or family.prompt,
        merge_ratio=merge_ratio,
    )


def encoder_of(settings: BackboneSettings, method: MethodSettings) -> SampleEncoder:
    """The encoder of a run: a merger leaves fewer vision tokens."""
    return open_encoder(settings, merge_ratio=method.merge_ratio if method.enable_token_merger else None)


def load_backbone(settings: BackboneSettings) -> nn.Module:
    """The model in evaluation mode, without dropout, attending through SDPA; as its folder has it, else in fp32."""
    if settings.name in TINY:
        return tiny_model(settings.name, seed=settings.seed)
    config = load_configuration(Path(settings.name))
    family_of(config)
    without_dropout(config)
    model = load_weights_of(
        transformers.AutoModelForImageTextToText, settings.name, config=config, attn_implementation="sdpa"
    )
    ready: nn.Module = model.eval()
    return ready


def _image_processor(settings: BackboneSettings, config: PretrainedConfig) -> Any:
    """transformers' own, for families whose images it lays out."""
    if config.model_type == "llava":
        return None
    if settings.name not in TINY:
        return load_part(transformers.AutoImageProcessor, settings.name)
    vision = config.vision_config
    if config.model_type == "llava_next":
        side = vision.image_size
        return _pil("LlavaNextImageProcessor")(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=config.image_grid_pinpoints,
        )
    unit = vision.patch_size * vision.spatial_merge_size
    return _pil("Qwen2VLImageProcessor")(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": unit * unit, "longest_edge": 16 * unit * unit},
    )


def _pil(name: str) -> Any:
    """The processor that needs no torchvision, under the name this transformers has for it."""
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
