"""Recordings, images and series that a model takes, found by trying: the names of its inputs say what may be there, a run
says in which form.

names of inputs -> forms they may have -> the first form in which samples run alone -> samples, and how they go together
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.random_samples import plain_ids

Sample = dict[str, Tensor]
MOST_PLACEHOLDERS = 300
"""Tokens that may stand for one recording in a text."""
SCALE = 16
"""Cells of a recording for each cell that is asked for."""


@dataclass(frozen=True, slots=True)
class MediaForm:
    """How one kind of input is laid out."""

    name: str
    """The argument of the model."""
    layout: str
    """wave [T], bands-last [T, F], bands-first [F, T], channels [T, C], image [C, H, W], patches [T, F]."""
    bands: int = 0
    cells: int = 0
    """A length that is the same for all samples; 0 where every sample has its own."""
    unit: int = 1
    """Lengths are multiples of it."""
    mask: str = ""
    """The argument that says which cells are real, if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaInputs:
    """Samples of one model, and how several of them become the arguments of one call."""

    form: MediaForm
    takes: frozenset[str]
    samples: list[Sample]

    def together(self, chosen: Sequence[Sample]) -> dict[str, Any]:
        """What a processor makes of several samples: padded with 0 on the right, with the masks that the model takes."""
        out: dict[str, Any] = {}
        for name in chosen[0]:
            parts = [sample[name] for sample in chosen]
            axis = 1 if name == self.form.name and self.form.layout == "bands-first" else 0
            out[name] = _padded(parts, axis)
            mask = self.form.mask if name == self.form.name else _MASKS.get(name, "")
            if mask and mask in self.takes:
                lengths = torch.tensor([part.shape[axis] for part in parts])
                out[mask] = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
        if "use_cache" in self.takes:
            out["use_cache"] = False
        return out


_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
_AUDIO = ("input_values", "inputs", "input_features")
_AUDIO_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask", "attention_mask")
_BANDS = ("num_mel_bins", "n_mels", "num_mels", "mel_bins", "input_feat_per_channel", "feature_projection_input_dim",
          "feature_size", "input_dim", "n_mel", "feature_dim")  # fmt: skip
_FIXED = ("max_source_positions", "max_length", "n_ctx")
_SERIES = ("context_length", "prediction_length")


def media_inputs(model: nn.Module, lengths: Sequence[int], seed: int = 0) -> MediaInputs:
    """Samples of these lengths, in the first form in which the model takes each alone; `ConfigError` if it takes none."""
    takes = frozenset(inspect.signature(model.forward).parameters)
    said: list[str] = []
    for form in _forms(model, takes):
        found = MediaInputs(form, takes, [])
        try:
            draw = torch.Generator().manual_seed(seed)
            found.samples.extend(_taken(model, found, length, draw) for length in lengths)
        except Exception as error:  # that is the question; what the model said of the first form is told
            lines = str(error).strip().splitlines() or ["-"]
            said.append(f"{type(error).__name__}: {lines[0]}"[:160])
            continue
        return found
    raise ConfigError(
        "no sample can be made for this model",
        seen=said[0] if said else "no recording, image or series among its arguments",
        do="give samples of your own to truebatch.verify",
    )


def _taken(model: nn.Module, found: MediaInputs, length: int, draw: torch.Generator) -> Sample:
    """A sample that the model takes alone: where a text has placeholders for a recording, their number is tried out."""
    sample = _sample(model, found.takes, found.form, length, draw)
    has_both = "input_ids" in found.takes and found.form.name in _AUDIO
    token = _audio_token(model) if has_both else None
    last, text = "", sample.get("input_ids")
    for number in range(MOST_PLACEHOLDERS if token is not None else 1):
        if number and text is not None:
            sample["input_ids"] = torch.cat([text[:1], text.new_full((number,), int(token or 0)), text[1:]])
        try:
            with torch.no_grad():
                model(**found.together([sample]))
        except Exception as error:
            if number == MOST_PLACEHOLDERS - 1 or token is None or str(error) == last:
                raise  # the number does not matter, so the form is wrong
            last = str(error)
            continue
        return sample
    raise ConfigError("no number of placeholders fits", seen=last[:160], do="try another form")


def _forms(model: nn.Module, takes: frozenset[str]) -> Iterator[MediaForm]:
    numbers = _numbers(model.config)
    audio = next((name for name in _AUDIO if name in takes), None)
    if "past_values" in takes:
        context = max([n for key in _SERIES for n in numbers.get(key, ())], default=16)
        channels = sorted({1, *numbers.get("num_input_channels", ()), *numbers.get("input_size", ())})
        yield MediaForm("past_values", "wave")
        for width in channels:
            yield MediaForm("past_values", "channels", width, context)
        return
    if audio is not None:
        mask = next((name for name in _AUDIO_MASKS if name in takes and not _is_for_text(name, takes)), "")
        bands = list(dict.fromkeys([*(n for key in _BANDS for n in numbers.get(key, ())), *_widths(model), 80, 160]))
        fixed = sorted({2 * n for key in _FIXED for n in numbers.get(key, ()) if n < 4000})
        if audio != "input_features":
            yield MediaForm(audio, "wave", mask=mask)
        for layout, width in product(("bands-last", "bands-first"), bands):
            yield MediaForm(audio, layout, width, 0, mask=mask)
            for cells in (*fixed, *numbers.get("max_length", ())):
                yield MediaForm(audio, layout, width, cells, mask=mask)
            yield MediaForm(audio, layout, width, 0, 200, mask)
        return
    if "pixel_values" in takes:
        sides = [*numbers.get("image_size", ()), 224]
        for side in dict.fromkeys(sides):
            yield MediaForm("pixel_values", "image", next(iter(numbers.get("num_channels", ())), 3), side)
        for patch in numbers.get("patch_size", ()):
            yield MediaForm("pixel_values", "patches", 3 * patch * patch, 4, mask="pixel_attention_mask")


def _widths(model: nn.Module) -> list[int]:
    """What the first layers of the part that reads recordings take."""
    parts = [m for name, m in model.named_modules() if any(word in name for word in ("audio", "encoder", "speech"))]
    found = [getattr(m, "in_features", getattr(m, "in_channels", None)) for m in parts or list(model.modules())]
    return list(dict.fromkeys(n for n in found if isinstance(n, int) and n > 1))[:8]


def _is_for_text(mask: str, takes: frozenset[str]) -> bool:
    return mask == "attention_mask" and "input_ids" in takes


def _audio_token(model: nn.Module) -> int | None:
    numbers = _numbers(model.config)
    names = ("audio_token_id", "audio_token_index", "audio_placeholder_id", "audio_pad_token_id", "speech_token_id")
    return next((found[0] for name in names if (found := numbers.get(name))), None)


def _numbers(config: Any, depth: int = 3) -> dict[str, list[int]]:
    """All whole numbers of a configuration and of those inside it, by name."""
    found: dict[str, list[int]] = {}
    for name, value in vars(config).items():
        values = value if isinstance(value, list | tuple) else [value]
        if hasattr(value, "to_dict") and depth:
            for key, inner in _numbers(value, depth - 1).items():
                found.setdefault(key, []).extend(inner)
        else:
            found.setdefault(name, []).extend(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return {name: list(dict.fromkeys(values)) for name, values in found.items()}


def _sample(model: nn.Module, takes: frozenset[str], form: MediaForm, length: int, draw: torch.Generator) -> Sample:
    out: Sample = {form.name: _media(form, length, draw)}
    for name in ("input_ids", "decoder_input_ids"):
        if name in takes:
            ids = plain_ids(model)
            out[name] = ids[torch.randint(0, len(ids), (2 + length % 7,), generator=draw)]
    if form.layout == "patches" and "spatial_shapes" in takes:
        out["spatial_shapes"] = torch.tensor([2, 2])
    return out


def _media(form: MediaForm, length: int, draw: torch.Generator) -> Tensor:
    cells = form.cells or -(-SCALE * (length + 2) // form.unit) * form.unit
    shapes: Mapping[str, tuple[int, ...]] = {
        "wave": (cells if form.name == "past_values" else 10 * cells + 400,),
        "bands-last": (cells, form.bands),
        "bands-first": (form.bands, cells),
        "channels": (cells, form.bands),
        "patches": (cells, form.bands),
        "image": (form.bands, cells, cells),
    }
    return torch.randn(shapes[form.layout], generator=draw)


def _padded(parts: Sequence[Tensor], axis: int) -> Tensor:
    widest = max(part.shape[axis] for part in parts)
    out = parts[0].new_zeros((len(parts), *parts[0].shape[:axis], widest, *parts[0].shape[axis + 1 :]))
    for row, part in zip(out, parts, strict=True):
        row.narrow(axis, 0, part.shape[axis]).copy_(part)
    return out
