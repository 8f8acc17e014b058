"""Images go through the vision tower here, and one that was there before is not encoded again.

A tower that takes all patches of a batch at once gives an image other bits beside other images. So all new images of a
batch go together, in one call of attention a layer, only where bits are not promised, or where they are those of a
planned batch: then an image of an earlier batch is encoded again, because a run that begins in between would have to.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError
from truebatch.generation.interface import Decoder, DecoderWrapper, Prompt, Session
from truebatch.hf.attention.packed import TABLE_WORDS
from truebatch.hf.attention.vision_tower import one_call_for_images
from truebatch.hf.forward_inputs import ONE_AT_A_TIME, inner_model, inspect_forward
from truebatch.hf.image_fields import style_of
from truebatch.hf.numerics import are_close


class ImagePixels(NamedTuple):
    """The pixels of an image, its grid where the model takes one, and its size as host numbers."""

    pixels: Tensor
    grid: Tensor | None
    size: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePrompt(Prompt):
    """A prompt that knows its images by their content."""

    image_hashes: tuple[bytes, ...] = ()


@dataclass(slots=True)
class ImageDecoder(DecoderWrapper):
    """A decoder that encodes images itself and keeps the features of the last ones; for models that allow it."""

    decoder: Decoder
    model: nn.Module
    most: int = 64
    """Images whose features are kept from batch to batch; 0 keeps none."""
    together: bool = False
    """Encode the new images of a batch in one pass; an image's bits then depend on its company."""
    reused: int = 0
    is_equal: bool | None = None
    """Whether images of one pass were found to have the features they have alone; None before the first such pass."""
    _known: OrderedDict[tuple[bytes, tuple[int, ...]], Any] = field(default_factory=OrderedDict)

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """As the inner decoder does, with images encoded here."""
        with self.encoding(prompts):
            return self.decoder.start(prompts)

    @contextmanager
    def encoding(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """While open, the model's own way to encode images is replaced, for one forward pass of these prompts."""
        hashes = [hash_ for prompt in prompts for hash_ in getattr(prompt, "image_hashes", ())]
        seeing = [prompt for prompt in prompts if "pixel_values" in prompt.inputs]
        if not all(getattr(prompt, "image_hashes", ()) for prompt in seeing) or not hashes:
            yield
            return
        with ONE_AT_A_TIME:
            yield from self._encoding_here(prompts, hashes)

    def _encoding_here(self, prompts: Sequence[Prompt], hashes: Sequence[bytes]) -> Iterator[None]:
        owner: Any = inner_model(self.model)
        original = owner.get_image_features

        def each(pixel_values: Tensor, image_grid_thw: Tensor | None = None, *more: Any, **named: Any) -> Any:
            parts = _split(pixel_values, image_grid_thw, prompts)
            named_by = hashes
            if len(parts) != len(hashes):  # an image may come in several pieces: then a prompt is identified, not each
                parts, named_by = _by_prompt(prompts, pixel_values)
            # Some versions of transformers hand the segment table of the text down to the tower.
            options = {name: value for name, value in named.items() if name not in TABLE_WORDS}
            return _joined(self._features(lambda **given: original(*more, **given, **options), parts, named_by))

        owner.get_image_features = each
        try:
            with one_call_for_images(self.model) if self.together else nullcontext():
                yield
        finally:
            del owner.get_image_features  # the instance's; the class still has its own

    def _features(self, encode: Callable[..., Any], parts: Sequence[ImagePixels], hashes: Sequence[bytes]) -> list[Any]:
        """The features of every image, those of known ones as they are."""
        keys = [(hash_, part.size) for part, hash_ in zip(parts, hashes, strict=True)]
        new = {key: part for key, part in zip(keys, parts, strict=True) if key not in self._known}
        self.reused += len(keys) - len(new)
        found = dict(zip(new, self._encoded(encode, list(new.values())), strict=True))
        out = [self._known[key] if key in self._known else found[key] for key in keys]
        for key, one in zip(keys, out, strict=True):
            if self.most:
                self._known[key] = one
                self._known.move_to_end(key)
        while len(self._known) > self.most:
            self._known.popitem(last=False)
        return out

    def _encoded(self, encode: Callable[..., Any], parts: Sequence[ImagePixels]) -> list[Any]:
        is_single = all(part.grid is not None or len(part.pixels) == 1 for part in parts)
        if self.together and self.is_equal is not False and len(parts) > 1 and is_single:
            found = _parted(encode(**_given(parts)), len(parts))
            if found is None:
                self.is_equal = False
            elif self.is_equal is None:
                self._compare(encode, parts, found)
            if found is not None and self.is_equal:
                return found
        return [encode(**_given([part])) for part in parts]

    def _compare(self, encode: Callable[..., Any], parts: Sequence[ImagePixels], found: Sequence[Any]) -> None:
        """The two smallest images of the first pass are encoded alone too: some towers let images see each other."""
        few = sorted(range(len(parts)), key=lambda at: len(parts[at].pixels))[:2]
        pairs = [(_values(found[at]), _values(encode(**_given([parts[at]])))) for at in few]
        self.is_equal = all(one.shape == other.shape and are_close(one, other) for one, other in pairs)


def _given(parts: Sequence[ImagePixels]) -> dict[str, Tensor]:
    pixels, grids, _ = zip(*parts, strict=True)
    given = {"pixel_values": torch.cat(pixels)}
    return given if grids[0] is None else {**given, "image_grid_thw": torch.cat(grids)}


def can_encode_alone(model: nn.Module) -> bool:
    """Whether images of this model can be told apart in what its vision tower takes and gives."""
    border = inspect_forward(model)
    style = style_of(model, border) if "pixel_values" in border.accepts else None
    return style is not None and style.name in ("grid", "flat") and hasattr(inner_model(model), "get_image_features")


def _split(pixels: Tensor, grid: Tensor | None, prompts: Sequence[Prompt]) -> list[ImagePixels]:
    if grid is None:
        return [ImagePixels(one, None, tuple(one.shape)) for one in torch.split(pixels, 1)]
    sizes = _grids(prompts) if len(_grids(prompts)) == len(grid) else grid.tolist()
    parts = torch.split(pixels, [math.prod(size) for size in sizes])
    return [ImagePixels(*one) for one in zip(parts, torch.split(grid, 1), map(tuple, sizes), strict=True)]


def _grids(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Of all images, from the prompts: their grids are on the host, so no GPU sync is needed."""
    given = [prompt.inputs.get("image_grid_thw") for prompt in prompts]
    return [size for grid in given if grid is not None for size in grid.tolist()]


def _by_prompt(prompts: Sequence[Prompt], pixels: Tensor) -> tuple[list[ImagePixels], list[bytes]]:
    """All pixels of a prompt as one, known by all its images."""
    given = [prompt for prompt in prompts if "pixel_values" in prompt.inputs]
    numbers = [len(prompt.inputs["pixel_values"]) for prompt in given]
    if sum(numbers) != len(pixels):
        raise BatchError(
            "a model encodes other images than its prompts have",
            seen=f"{len(pixels)} images or pieces of images for {len(given)} prompts with {sum(numbers)}",
            do="leave the reuse of images out (reuse_images=False)",
        )
    hashes = [b"".join(getattr(prompt, "image_hashes", ())) for prompt in given]
    return [ImagePixels(some, None, tuple(some.shape)) for some in torch.split(pixels, numbers)], hashes


def _parted(found: Any, number: int) -> list[Any] | None:
    """The output of all images as outputs of single ones; None where it cannot be told which belong to which."""
    features = found.pooler_output
    if len(features) != number:
        return None
    has_layers = getattr(found, "deepstack_features", None) is not None  # there may be none of them
    layers = [_by_image(layer, features) for layer in found.deepstack_features] if has_layers else []
    parts = []
    for at in range(number):
        part = copy.copy(found)  # some models do not take what they give as arguments
        part.pooler_output = features[at : at + 1]
        if has_layers:
            part.deepstack_features = [layer[at] for layer in layers]
        parts.append(part)
    return parts


def _values(found: Any) -> Tensor:
    """All features of one image, those of deep layers too, in one row."""
    layers = getattr(found, "deepstack_features", None) or ()
    pieces = [piece for part in (found.pooler_output, *layers) for piece in part]
    return torch.cat([piece.flatten() for piece in pieces])


def _by_image(layer: Any, features: Sequence[Tensor]) -> list[Any]:
    """What one layer gives, a piece an image: some versions of transformers give a tuple, others all in one tensor."""
    if isinstance(layer, Tensor):
        return list(torch.split(layer, [len(one) for one in features]))
    return [layer[at : at + 1] for at in range(len(features))]


def _joined(found: Sequence[Any]) -> Any:
    """The outputs of single images as the output of all of them: features stand one image after the other."""
    out = copy.copy(found[0])
    out.pooler_output = _put_together([one.pooler_output for one in found])
    layers = getattr(out, "deepstack_features", None)
    if layers is not None:
        out.deepstack_features = [
            _put_together([one.deepstack_features[at] for one in found]) for at in range(len(layers))
        ]
    return out


def _put_together(pieces: Sequence[Any]) -> Any:
    """Features of single images in the form in which the model gives them: one tensor, or one for each image."""
    if isinstance(pieces[0], Tensor):
        return torch.cat(list(pieces))
    return tuple(feature for piece in pieces for feature in piece)
