"""Processors for tiny vision-language models: characters as tokens, special ones at the ids of the model's configuration.

tiny_model(name, "vision_language") -> tiny_processor -> both saved in a folder that loads as real ones do
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from truebatch.errors import ConfigError
from truebatch.hf.load import without_chatter
from truebatch.hf.processors import images_only
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.sizes import IMAGE, PATCH

_IMAGE_TOKEN, _UNKNOWN = "<image>", "<unk>"
_FIRST_CHARACTER = 11
_FIRST_OF_OURS = 140
"""Behind the ids that tiny configurations name."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}END{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_GRID = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
_AREA = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 24 * (2 * PATCH) ** 2}
_SQUARE = {"height": IMAGE, "width": IMAGE}
_CUT = {"size": {"shortest_edge": IMAGE}, "crop_size": _SQUARE}
_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"} | {
    f"vision_{end}_token": f"<|vision_{end}|>" for end in ("start", "end")
}
_TILED = {"image_token": "<image>", "video_token": "<video>"}


def _qwen(kind: str) -> Callable[[Any, Any], Any]:
    def make(config: Any, tokenizer: Any) -> Any:
        images = _images("qwen2_vl", "Qwen2VL", **_GRID, size=_AREA)
        return images_only(getattr(transformers, kind))(image_processor=images, tokenizer=tokenizer)

    return make


def _llava(config: Any, tokenizer: Any) -> Any:
    return transformers.LlavaProcessor(
        _images("clip", "CLIP", **_CUT), tokenizer, patch_size=PATCH, image_token=_IMAGE_TOKEN,
        vision_feature_select_strategy=config.vision_feature_select_strategy, num_additional_image_tokens=1,
    )  # fmt: skip


def _llava_next(config: Any, tokenizer: Any) -> Any:
    images = _images("llava_next", "LlavaNext", **_CUT, image_grid_pinpoints=config.image_grid_pinpoints)
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=PATCH, num_additional_image_tokens=1, image_token=_IMAGE_TOKEN,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )  # fmt: skip


def _onevision(config: Any, tokenizer: Any) -> Any:
    images = _images(
        "llava_onevision", "LlavaOnevision", size=_SQUARE, image_grid_pinpoints=config.image_grid_pinpoints
    )
    return images_only(transformers.LlavaOnevisionProcessor)(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=(IMAGE // PATCH) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )  # fmt: skip


def _internvl(config: Any, tokenizer: Any) -> Any:
    images = _images("got_ocr2", "GotOcr2", size=_SQUARE, max_patches=4, min_patches=1, crop_to_patches=True)
    return images_only(transformers.InternVLProcessor)(
        image_processor=images, tokenizer=tokenizer, image_seq_length=(IMAGE // PATCH) ** 2 // 4
    )


def _gemma3(config: Any, tokenizer: Any) -> Any:
    images = _images("gemma3", "Gemma3", size=_SQUARE)
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=config.mm_tokens_per_image)


def _paligemma(config: Any, tokenizer: Any) -> Any:
    images = _images("siglip", "Siglip", size=_SQUARE)
    images.image_seq_length = (IMAGE // PATCH) ** 2
    made = transformers.PaliGemmaProcessor(images, tokenizer)
    tokenizer.chat_template = made.chat_template = None
    return made


def _idefics3(config: Any, tokenizer: Any) -> Any:
    images = _images("idefics3", "Idefics3", size={"longest_edge": 2 * IMAGE}, max_image_size={"longest_edge": IMAGE})
    return transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=(IMAGE // PATCH) ** 2 // config.scale_factor**2
    )


def _smolvlm(config: Any, tokenizer: Any) -> Any:
    images = _images("smolvlm", "SmolVLM", size={"longest_edge": 2 * IMAGE}, max_image_size={"longest_edge": IMAGE})
    return images_only(transformers.SmolVLMProcessor)(
        image_processor=images, tokenizer=tokenizer, video_processor=None,
        image_seq_len=(IMAGE // PATCH) ** 2 // config.scale_factor**2,
    )  # fmt: skip


def _mistral3(config: Any, tokenizer: Any) -> Any:
    size = {"longest_edge": 2 * IMAGE}
    images = _images("pixtral", "Pixtral", size=size, patch_size={"height": 2 * PATCH, "width": 2 * PATCH})
    return transformers.PixtralProcessor(
        images, tokenizer, patch_size=PATCH, spatial_merge_size=config.spatial_merge_size
    )


def _glm4v(config: Any, tokenizer: Any) -> Any:
    images = _images("glm4v", "Glm4v", **_GRID, size=_AREA)
    return images_only(transformers.Glm4vProcessor)(image_processor=images, tokenizer=tokenizer)


_ROWS = {f"more{at}": f"<row_{at // 2 + 1}_col_{at % 2 + 1}>" for at in range(4)}
_IDEFICS = {"image_token": "<image>", "more4": "<fake_token_around_image>", "more5": "<global-img>"} | _ROWS

_MADE: Mapping[str, tuple[Callable[[Any, Any], Any], Mapping[str, str], str]] = {
    "llava": (_llava, {"image_token": "<image>"}, "<image>"),
    "llava_next": (_llava_next, {"image_token": "<image>"}, "<image>"),
    "llava_onevision": (_onevision, _TILED, "<image>"),
    "qwen2_vl": (_qwen("Qwen2VLProcessor"), _QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen2_5_vl": (_qwen("Qwen2_5_VLProcessor"), _QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (_qwen("Qwen3VLProcessor"), _QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "internvl": (
        _internvl,
        {
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>", "start_image_token": "<img>",
            "end_image_token": "</img>",
        },
        "<IMG_CONTEXT>",
    ),
    "gemma3": (
        _gemma3,
        {"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
    ),
    "paligemma": (_paligemma, {"image_token": "<image>"}, "<image>"),
    "idefics3": (_idefics3, _IDEFICS, "<image>"),
    "smolvlm": (_smolvlm, _IDEFICS, "<image>"),
    "mistral3": (
        _mistral3, {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}, "[IMG]",
    ),
    "glm4v": (
        _glm4v,
        {
            "image_token": "<|image|>", "video_token": "<|video|>", "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>", "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
}  # fmt: skip
"""Architecture -> how its processor is made, its special tokens by name, and what its chat template writes for an image."""

WITH_PROCESSORS = tuple(_MADE)


def tiny_processor(model: nn.Module) -> Any:
    """The processor of a tiny vision-language model: its tokenizer has the model's ids, its images the model's sizes."""
    config: Any = model.config
    if config.model_type not in _MADE:
        raise ConfigError(
            f"there is no tiny processor for {config.model_type!r}",
            seen=config.model_type,
            do=f"use one of {WITH_PROCESSORS}",
        )
    make, tokens, place = _MADE[config.model_type]
    tokenizer = _tokenizer(config, tokens, place)
    made = make(config, tokenizer)
    if tokenizer.chat_template is not None:
        made.chat_template = tokenizer.chat_template
    return made


def tiny_vlm_folder(folder: Path, model_type: str, seed: int = 0) -> Path:
    """A tiny vision-language model with its processor, saved as real ones are."""
    model: Any = tiny_model(model_type, "vision_language", seed)
    with without_chatter():
        model.save_pretrained(folder)
        made = tiny_processor(model)
        made.save_pretrained(folder)
        if len(made.tokenizer) > len(_tokenizer(model.config, *_MADE[model_type][1:])):
            # PaliGemma's processor adds a thousand tokens, beside which no special one is found in a file of this tokenizer.
            tokenizer = _tokenizer(model.config, *_MADE[model_type][1:])
            tokenizer.chat_template = None
            tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(config: Any, tokens: Mapping[str, str], place: str) -> Any:
    text = config.get_text_config()
    ends = {"pad_token": ("<pad>", 0)}
    for name, default in (("bos_token", 1), ("eos_token", 2)):
        found = getattr(text, f"{name}_id", None)
        ends[name] = (f"<{name[:3]}>", default if found is None else int(found))
    special = {name: (content, _id_of(config, name, at)) for at, (name, content) in enumerate(tokens.items())}
    vocab = dict((*ends.values(), *special.values()))
    for at, character in enumerate(("\n", *sorted(set(string.printable) - set(string.whitespace)), " ")):
        vocab[character] = _FIRST_CHARACTER + at
    vocab[_UNKNOWN] = 3
    inner = Tokenizer(models.WordLevel(vocab=vocab, unk_token=_UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    named = {name: content for name, content in tokens.items() if not name.startswith("more")}
    made: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=_UNKNOWN, clean_up_tokenization_spaces=False,
        **{name: content for name, (content, _) in ends.items()},
        extra_special_tokens={**named, **{name: content for name, content in tokens.items() if name.startswith("more")}},
    )  # fmt: skip
    made.chat_template = TEMPLATE.replace("PLACE", place).replace("END", ends["eos_token"][0])
    return made


def _id_of(config: Any, name: str, at: int) -> int:
    """The id that a configuration has for a special token; one of ours where it has none."""
    asked = "image_token" if name == "context_image_token" else name
    for ending in ("_id", "_index"):
        found = getattr(config, f"{asked}{ending}", None)
        if isinstance(found, int):
            return found
    return _FIRST_OF_OURS + at


def _images(module: str, name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision."""
    found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{name}ImageProcessorPil")(**settings)
