"""Images of a vision-language model: the ways in which they are handed over, as declared fields.

flat: all images one after the other; grid: all patches one after the other, with a grid an image; rows: beside the text;
tiles: all tiles of all images; sized: images of their own height and width, padded to the largest of a micro-batch only
when they are handed to the model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.hf.forward_inputs import ForwardSignature, Route, inner_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PIXELS = Field(name="pixel_values", kind="flat", axis="images", dtype="float32")
_SIZES = Field(name="image_sizes", kind="flat", axis="images", dtype="int64")
_TILES = Field(name="pixel_values", kind="flat", axis="tiles", dtype="float32")
_COLOURS = Field(name="pixel_values", kind="flat", axis="colours", dtype="float32")

OPTIONAL_IMAGE_FIELDS: Mapping[str, Field] = {
    "pixel_attention_mask": Field(name="pixel_attention_mask", axis="images", dtype="int64"),
    "mrope_positions": Field(name="mrope_positions", dtype="int64"),
}
"""Taken along where the sample has them: which pixels are real, and [length, 3] positions made when it was loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStyle:
    """One way to hand over images."""

    name: str
    fields: tuple[Field, ...]
    needs: frozenset[str]
    """A model takes images this way if its forward takes these arguments, and none of `SPECIAL`."""


STYLES: tuple[ImageStyle, ...] = (
    ImageStyle(
        name="grid",
        fields=(
            Field(name="pixel_values", kind="flat", axis="patches", dtype="float32"),
            Field(name="image_grid_thw", kind="flat", axis="images", dtype="int64"),
        ),
        needs=frozenset({"pixel_values", "image_grid_thw"}),
    ),
    ImageStyle(
        name="rows",
        fields=(Field(name="pixel_values", axis="images", dtype="float32"),),
        needs=frozenset({"pixel_values", "pixel_attention_mask"}),
    ),
    ImageStyle(name="tiles", fields=(_TILES, _SIZES), needs=frozenset({"pixel_values", "image_sizes"})),
    ImageStyle(name="sized", fields=(_COLOURS, _SIZES), needs=frozenset({"pixel_values", "image_sizes"})),
    ImageStyle(name="flat", fields=(_PIXELS,), needs=frozenset({"pixel_values"})),
)

ONLY_FOR = {
    "tiles": frozenset({"llava_next", "llava_next_video", "llava_onevision"}),
    "sized": frozenset({"pixtral", "mistral3", "mistral_large4", "lighton_ocr"}),
}
"""Styles that only some architectures have; others take `image_sizes` and do not need them."""

SPECIAL = frozenset(
    {
        "aspect_ratio_ids",
        "cross_attention_mask",
        "decoder_input_ids",
        "high_res_pixel_values",
        "image_attention_mask",
        "image_embeds_position_mask",
        "image_grid_hw",
        "image_merge_sizes",
        "image_patches",
        "image_position_ids",
        "image_token_pooling",
        "pixel_values_local",
        "protein_input_ids",
        "qformer_input_ids",
        "spatial_shapes",
        "state",
        "target_sizes",
    }
)
"""Arguments that hand over images in a way no style knows."""


def style_of(model: nn.Module, border: ForwardSignature) -> ImageStyle | None:
    """How this model takes its images; None where no style fits."""
    config: PretrainedConfig = model.config
    if SPECIAL & border.accepts or image_token_id(model) is None:
        return None
    return next((s for s in STYLES if s.needs <= border.accepts and _fits(s, config)), None)


def refuse_images(model: nn.Module, border: ForwardSignature) -> ConfigError:
    """The error that says why no style fits."""
    unknown = sorted(SPECIAL & border.accepts)
    return ConfigError(
        f"{type(model).__name__} takes its images in a way that is not in the table of heads",
        seen=f"arguments {unknown}" if unknown else "no placeholder token for images in its configuration",
        do="write an Objective for it, and verify that instead of the model",
    )


def _fits(style: ImageStyle, config: PretrainedConfig) -> bool:
    return style.name not in ONLY_FOR or config.model_type in ONLY_FOR[style.name]


def image_token_id(model: nn.Module) -> int | None:
    """The id that stands for one image feature in `input_ids`."""
    config: PretrainedConfig = model.config
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


def flat_pixels(style: ImageStyle, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The pixels of one sample as the fields of its style have them: tiles and images of any size, end to end.

    Tiles that a processor adds to make the images of a sample equal must have been taken off before (`real_tiles`).
    """
    if "pixel_values" not in sample or style.name not in ("tiles", "sized"):
        return {}
    pixels = torch.as_tensor(sample["pixel_values"])
    if style.name == "tiles":
        return {"pixel_values": pixels.flatten(0, 1)} if pixels.ndim == 5 else {}
    if pixels.ndim != 4:
        return {}
    sizes = torch.as_tensor(sample["image_sizes"]).tolist()
    parts = [image[:, :height, :width].flatten() for image, (height, width) in zip(pixels, sizes, strict=True)]
    return {"pixel_values": torch.cat(parts)}


def real_tiles(pixels: Tensor, numbers: Sequence[int]) -> Tensor:
    """[n, C, H, W]: the first tiles of every image of [images, tiles, C, H, W]; the others only fill up."""
    return torch.cat([tiles[:number] for tiles, number in zip(pixels, numbers, strict=True)])


def tiles_of(config: Any, sizes: Tensor, images_of_samples: Any = None) -> list[int]:
    """How many tiles each image of (height, width) has, as the models of LLaVA-NeXT and LLaVA-OneVision count them."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    pinpoints, side = config.image_grid_pinpoints, config.vision_config.image_size
    found = [int(image_size_to_num_patches(size, pinpoints, side)) for size in sizes]
    if config.model_type != "llava_onevision" or images_of_samples is None:
        return found
    is_tiled = [n == 1 for n in torch.as_tensor(images_of_samples).tolist() for _ in range(n)]
    return [number if tiled else 1 for number, tiled in zip(found, is_tiled, strict=True)]


def pixel_inputs(style: ImageStyle, fields: Mapping[str, Tensor]) -> dict[str, Any]:
    """The images among the fields of a micro-batch as arguments of the model; none where it has no image."""
    names = [f.name for f in style.fields]
    names += [name for name in ("pixel_attention_mask",) if name in fields]
    out: dict[str, Any] = {name: fields[name] for name in names if fields[name].numel()}
    if style.name == "sized" and out:
        out["pixel_values"] = _padded_images(out["pixel_values"], out["image_sizes"].tolist())
    return out


def _padded_images(colours: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """[images, C, H, W] from the images end to end, with zeros below and to the right."""
    areas = [height * width for height, width in sizes]
    channels = colours.numel() // sum(areas)
    out = colours.new_zeros(len(sizes), channels, *(max(sides) for sides in zip(*sizes, strict=True)))
    parts = torch.split(colours, [channels * area for area in areas])
    for at, (image, (height, width)) in enumerate(zip(parts, sizes, strict=True)):
        out[at, :, :height, :width] = image.view(channels, height, width)
    return out


def _images_of_samples(batch: MicroBatch) -> Tensor:
    """[N]: how many images each sample has."""
    numbers = [len(sizes) for sizes in batch.per_sample(batch["image_sizes"], "images")]
    return torch.tensor(numbers, dtype=torch.int64)


def image_inputs(
    model: nn.Module, border: ForwardSignature, batch: MicroBatch, style: ImageStyle, route: Route
) -> dict[str, Any]:
    """Arguments with the images of a micro-batch, and the positions that follow from them."""
    forget_last_call(model)
    is_image = torch.eq(batch["input_ids"], image_token_id(model) or 0)
    out = pixel_inputs(style, batch.fields)
    if style.name == "tiles" and "batch_num_images" in border.accepts and out:
        out["batch_num_images"] = _images_of_samples(batch)
    if "mm_token_type_ids" in border.accepts:
        out["mm_token_type_ids"] = (is_image & batch.is_real).long()
    if "token_type_ids" in border.accepts and "token_type_ids" not in batch.fields:
        out["token_type_ids"] = (is_image & batch.is_real).long()
    if border.has_grid_positions and route in ("packed", "block"):
        out["position_ids"] = grid_positions(model, batch)
    return out


def forget_last_call(model: nn.Module) -> None:
    """Drop the position offsets that a model keeps from its last call; a training step must not inherit them."""
    for part in (model, inner_model(model)):
        if getattr(part, "rope_deltas", None) is not None:
            setattr(part, "rope_deltas", None)  # noqa: B010 (nn.Module types do not know it)


def grid_positions(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[3, B, T]: time, height and width, each as if the sample were alone."""
    if "mrope_positions" in batch.fields:
        return batch["mrope_positions"].permute(2, 0, 1)
    ids = batch.per_sample(batch["input_ids"])
    grids = batch.per_sample(batch["image_grid_thw"], "images")
    axis = batch.rows()
    found = [sample_positions(model, tokens, grid) for tokens, grid in zip(ids, grids, strict=True)]
    three = axis.put_tokens(torch.cat(found).to(axis.positions.device))  # [B, T, 3]
    return three.permute(2, 0, 1)


def sample_positions(model: nn.Module, tokens: Tensor, grid: Tensor | None) -> Tensor:
    """[n, 3] time, height and width of one sample's tokens [n] with images of these grids."""
    inner: Any = inner_model(model)
    given: dict[str, Any] = {"image_grid_thw": grid if grid is not None and len(grid) else None}
    named = _arguments(inner.get_rope_index)
    if "attention_mask" in named:  # some models count by it alone
        given["attention_mask"] = torch.ones_like(tokens)[None]
    if "mm_token_type_ids" in named:
        given["mm_token_type_ids"] = torch.eq(tokens, image_token_id(model) or 0).long()[None]
    positions: Tensor = inner.get_rope_index(tokens[None], **given)[0][:, 0].T
    return positions


def count_image_tokens(model: nn.Module, images: Mapping[str, Tensor]) -> int:
    """How many cells these images take in `input_ids`, asked of the model itself."""
    inner = next((p for p in (model, inner_model(model)) if hasattr(p, "get_image_features")), None)
    if inner is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how many cells an image takes",
            seen="no method get_image_features",
            do="bring samples made by the processor of this model",
        )
    ask: Any = inner
    weight = next(model.parameters())
    given = {name: v.to(weight.device, weight.dtype if v.is_floating_point() else None) for name, v in images.items()}
    with torch.no_grad():
        found = ask.get_image_features(**given)
    pooled = getattr(found, "pooler_output", None)
    return _count_rows(found if pooled is None else pooled)


def _count_rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if isinstance(features, list | tuple):
        tensors = [f for f in features if isinstance(f, Tensor)]
        return sum(_count_rows(f) for f in tensors)
    return _count_rows(features.last_hidden_state)


def _arguments(function: Any) -> set[str]:
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount])
