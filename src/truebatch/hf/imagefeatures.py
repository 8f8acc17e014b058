"""Images go through the vision tower one by one, and one that was there before is not encoded again.

One by one, because a tower that takes all patches of a batch at once gives an image other bits beside other images.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.generation.prompts import Decoder, Prompt, Session
from truebatch.hf.images import style_of
from truebatch.hf.inputs import inner_model, read_border


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePrompt(Prompt):
    """A prompt that knows its images by their content."""

    image_hashes: tuple[bytes, ...] = ()


@dataclass(slots=True)
class ImageDecoder:
    """A decoder that encodes each image alone and keeps the features of the last ones; for models that allow it."""

    decoder: Decoder
    model: nn.Module
    most: int = 64
    """Images whose features are kept; 0 keeps none."""
    reused: int = 0
    _known: OrderedDict[tuple[bytes, bytes], Any] = field(default_factory=OrderedDict)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.decoder.end_ids

    @property
    def max_length(self) -> int | None:
        """Most tokens of a prompt and its continuation together."""
        return self.decoder.max_length

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """As the inner decoder does, with images encoded one by one."""
        hashes = [hash_ for prompt in prompts for hash_ in getattr(prompt, "image_hashes", ())]
        if not hashes:
            return self.decoder.start(prompts)
        with self._one_by_one(hashes):
            return self.decoder.start(prompts)

    @contextmanager
    def _one_by_one(self, hashes: Sequence[bytes]) -> Iterator[None]:
        """The model's own way to encode images, replaced for one forward pass and put back."""
        owner: Any = inner_model(self.model)
        original = owner.get_image_features

        def each(pixel_values: Tensor, image_grid_thw: Tensor | None = None, *more: Any, **named: Any) -> Any:
            parts = _split(pixel_values, image_grid_thw)
            if len(parts) != len(hashes):
                raise AssertionError(f"{len(parts)} images came, {len(hashes)} were announced")
            found = [self._features(original, *one, more, named) for one in zip(parts, hashes, strict=True)]
            return _joined(found)

        owner.get_image_features = each
        try:
            yield
        finally:
            del owner.get_image_features  # the instance's; the class still has its own

    def _features(
        self,
        encode: Any,
        part: tuple[Tensor, Tensor | None],
        hash_: bytes,
        more: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        pixels, grid = part
        key = (hash_, str(grid.tolist() if grid is not None else tuple(pixels.shape)).encode())
        if key in self._known:
            self.reused += 1
            self._known.move_to_end(key)
            return self._known[key]
        given = {"pixel_values": pixels} | ({} if grid is None else {"image_grid_thw": grid})
        found = encode(*more, **given, **named)
        if self.most:
            self._known[key] = found
            while len(self._known) > self.most:
                self._known.popitem(last=False)
        return found


def can_encode_alone(model: nn.Module) -> bool:
    """Whether images of this model can be told apart in what its vision tower takes and gives."""
    border = read_border(model)
    style = style_of(model, border) if "pixel_values" in border.accepts else None
    return style is not None and style.name in ("grid", "flat") and hasattr(inner_model(model), "get_image_features")


def _split(pixels: Tensor, grid: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    if grid is None:
        return [(one, None) for one in torch.split(pixels, 1)]
    parts = torch.split(pixels, grid.prod(dim=-1).tolist())
    return list(zip(parts, torch.split(grid, 1), strict=True))


def _joined(found: Sequence[Any]) -> Any:
    """The outputs of single images as the output of all of them: features stand one image after the other."""
    out = copy.copy(found[0])
    out.pooler_output = tuple(feature for one in found for feature in one.pooler_output)
    layers = getattr(out, "deepstack_features", None)
    if layers is not None:
        out.deepstack_features = [
            tuple(feature for one in found for feature in one.deepstack_features[at]) for at in range(len(layers))
        ]
    return out
