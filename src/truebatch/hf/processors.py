"""The processor of a model folder: a tokenizer, or text with images. Videos need torchvision, images do not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from truebatch.hf.load import load_config, load_part

VIDEO = "video_processor"


def load_processor(folder: Path) -> Any:
    """The processor of a vision-language model, or the tokenizer of a text model.

    Without torchvision, or from a folder without their settings, a processor that also takes videos (Qwen-VL,
    LLaVA-OneVision) is loaded for images alone.
    """
    kind = None if find_spec("torchvision") and _has_video_settings(folder) else _video_class(folder)
    return load_part(transformers.AutoProcessor if kind is None else images_only(kind), folder)


def images_only(kind: type[Any]) -> type[Any]:
    """A processor class without its video processor. It has the name of the class, and saves and loads in its place."""

    def attributes(cls: type[Any]) -> list[str]:
        return [name for name in kind.get_attributes() if name != VIDEO]

    def from_parts(cls: Any, args: Sequence[Any], *more: Any, **settings: Any) -> Any:
        is_asked = inspect.signature(kind.__init__).parameters[VIDEO].default is inspect.Parameter.empty
        return super(made, cls).from_args_and_dict([*args, None] if is_asked else args, *more, **settings)

    added = {
        "get_attributes": classmethod(attributes),
        "from_args_and_dict": classmethod(from_parts),
        "__module__": kind.__module__,
    }
    made: type[Any] = type(kind.__name__, (kind,), added)
    return made


def _has_video_settings(folder: Path) -> bool:
    """In a file of their own, in that of the images, which folders of older versions have for both, or beside all others."""
    if any((folder / name).is_file() for name in ("video_preprocessor_config.json", "preprocessor_config.json")):
        return True
    whole = folder / "processor_config.json"
    return whole.is_file() and VIDEO in whole.read_text(encoding="utf-8")


def _video_class(folder: Path) -> type[Any] | None:
    """The class of the folder's processor, if a video processor is its last part."""
    if not (folder / "config.json").is_file():
        return None
    name = PROCESSOR_MAPPING_NAMES.get(load_config(folder).model_type)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if kind is None or not hasattr(kind, "get_attributes"):
        return None
    return kind if kind.get_attributes()[-1:] == [VIDEO] else None
