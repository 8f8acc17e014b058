"""Random samples that a model with a known head can read: ids away from special ones, labels, images of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.image_fields import count_image_tokens, image_token_id
from truebatch.testing.tiny_hf.sizes import TOKEN_ID

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Sample = dict[str, Any]


def make_samples(model: nn.Module, lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """One random sample for each length, prepared for `head_of(model).fields`.

    Lengths are in cells. A sample with images is as long as they and a little text need, if that is more. No id is
    special to the model (padding, begin, end, image, ...), so that nothing but the placeholders stands for an image.
    """
    head = head_of(model)
    draw = torch.Generator().manual_seed(seed)
    ids = plain_ids(model)
    samples = [_sample(head, model, length, at, ids, draw) for at, length in enumerate(lengths)]
    return [head.prepare(sample) for sample in samples]


def _sample(head: ModelHead, model: nn.Module, length: int, at: int, ids: Tensor, draw: torch.Generator) -> Sample:
    config: PretrainedConfig = model.config
    out: Sample = {"input_ids": _draw(ids, length, draw)}
    labels = int(getattr(config, "num_labels", 2))
    kind = head.kind.name
    if kind == "vision_language":
        out |= _with_images(model, head, length, at, ids, draw)
    elif kind == "seq2seq":
        out["labels"] = _draw(ids, 2 + (7 * length + at) % 11, draw)
    elif kind == "masked_lm":
        is_hidden = torch.rand(length, generator=draw) < 0.4
        is_hidden[at % length] = True
        out["labels"] = torch.where(is_hidden, out["input_ids"], -100)
    elif kind == "token_classification":
        out["labels"] = torch.randint(0, labels, (length,), generator=draw)
    elif kind == "sequence_classification":
        out["labels"] = _class(config, labels, draw)
    elif kind == "question_answering":
        out |= {"start_positions": length // 3, "end_positions": length - 1}
    return out


def _class(config: PretrainedConfig, labels: int, draw: torch.Generator) -> Any:
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.randint(0, 2, (labels,), generator=draw).float()
    if problem == "regression" or labels == 1:
        return torch.randn(labels, generator=draw)
    return torch.randint(0, labels, (), generator=draw)


def plain_ids(model: nn.Module) -> Tensor:
    """[n]: all ids of the vocabulary that mean nothing special."""
    config: PretrainedConfig = model.config
    text = config.get_text_config()
    special = {0, 1, 2, 3} | set(_special_ids(config))
    vocab = int(getattr(text, "vocab_size", 0) or config.vocab_size)
    return torch.tensor([i for i in range(vocab) if i not in special])


def _special_ids(config: PretrainedConfig) -> list[int]:
    out: list[int] = []
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            out += _special_ids(value)
        elif TOKEN_ID.search(name):
            values = value if isinstance(value, list | tuple) else [value]
            out += [v for v in values if isinstance(v, int)]
    return out


def _draw(ids: Tensor, number: int, draw: torch.Generator) -> Tensor:
    return ids[torch.randint(0, len(ids), (number,), generator=draw)]


def _with_images(model: nn.Module, head: ModelHead, length: int, at: int, ids: Tensor, draw: torch.Generator) -> Sample:
    assert head.images is not None
    images = _IMAGES[head.images.name](model, at, draw)
    ask = {name: value[None] if head.images.name == "rows" else value for name, value in images.items()}
    cells = count_image_tokens(model, ask)
    number = next(iter(images.values())).shape[0] if head.images.name != "grid" else len(images["image_grid_thw"])
    text = _draw(ids, max(length - cells, 2 + number), draw)
    return {**images, "input_ids": _placed(model, text, cells)}


def _placed(model: nn.Module, text: Tensor, cells: int) -> Tensor:
    config: PretrainedConfig = model.config
    image: list[int] = [int(image_token_id(model) or 0)] * cells
    begin, end = (getattr(config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
    block = [*([begin] if isinstance(begin, int) else []), *image, *([end] if isinstance(end, int) else [])]
    return torch.cat([text[:1], text.new_tensor(block), text[1:]])


def _flat_images(model: nn.Module, at: int, draw: torch.Generator) -> dict[str, Tensor]:
    channels, side = _channels(model), _side(model)
    return {"pixel_values": torch.randn(1 + at % 2, channels, side, side, generator=draw)}


def _sized_images(model: nn.Module, at: int, draw: torch.Generator) -> dict[str, Tensor]:
    """One image of its own height and width for each sample."""
    config: PretrainedConfig = model.config
    unit = _first(config.vision_config, "patch_size", default=14) * _first(config, "spatial_merge_size", default=1)
    whole, half = (max(_side(model) // part // unit, 1) * unit for part in (1, 2))
    height, width = [(whole, whole), (half, whole), (whole, half)][at % 3]
    pixels = torch.randn(1, _channels(model), height, width, generator=draw)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def _grid_images(model: nn.Module, at: int, draw: torch.Generator) -> dict[str, Tensor]:
    """One image of its own size for each sample; two sizes differ in height and in width."""
    config: PretrainedConfig = model.config
    vision = config.vision_config
    merge = _first(vision, "spatial_merge_size", "merge_size", default=2)
    grid = torch.tensor([[1, merge * (1 + at % 2), merge * (2 - (at // 2) % 2)]])
    patch = _first(vision, "patch_size", default=14)
    width = _channels(model) * _first(vision, "temporal_patch_size", "patch_temporal", default=1) * patch * patch
    return {"pixel_values": torch.randn(int(grid.prod()), width, generator=draw), "image_grid_thw": grid}


def _tiled_images(model: nn.Module, at: int, draw: torch.Generator) -> dict[str, Tensor]:
    """One image a sample, upright, lying or square, as a small whole and its tiles: two of them, or four."""
    config: PretrainedConfig = model.config
    size = config.image_grid_pinpoints[at % min(3, len(config.image_grid_pinpoints))]
    side = _side(model)
    tiles = 1 + (size[0] // side) * (size[1] // side)
    pixels = torch.randn(1, tiles, _channels(model), side, side, generator=draw)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([size])}


_IMAGES = {
    "flat": _flat_images,
    "rows": _flat_images,
    "sized": _sized_images,
    "tiles": _tiled_images,
    "grid": _grid_images,
}


def _channels(model: nn.Module) -> int:
    config: PretrainedConfig = model.config
    return _first(config.vision_config, "num_channels", "in_channels", "in_chans", default=3)


def _side(model: nn.Module) -> int:
    config: PretrainedConfig = model.config
    return _first(config.vision_config, "image_size", "img_size", default=224)


def _first(config: PretrainedConfig, *names: str, default: int) -> int:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
        if isinstance(found, list | tuple):
            return int(found[0])
    return default
