"""Asked of a stitched model before it is trained: does a token see the future, does padding or a neighbour matter?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from truebatch.errors import LawError
from truebatch_systems.stitched_llm.model.layer_forward import causality_violation

_LENGTHS = (12, 7, 3)
_AT = 6
_EXACT, _HALF = 1e-5, 2e-2
"""How far logits may move, as a share of the largest, by precision; a leak moves them by a large share."""
_ROUNDINGS, _MOST = 10, 1e-3
"""Or as far as so many roundings between the donors move them, in a model that makes much of little; at most this."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Largest change of a logit that should not have changed at all, as a share of the largest logit."""

    future: float
    """When a later token is another."""
    padding: float
    """When the ids under padding are others."""
    neighbours: float
    """Between a sample alone and the same sample padded right or left beside others."""
    limit: float

    @property
    def is_right(self) -> bool:
        """True if no change is above the limit."""
        return max(self.future, self.padding, self.neighbours) <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For `mask_selftest.json`."""
        return {**asdict(self), "is_right": self.is_right}

    def __str__(self) -> str:
        verdict = "causal, padding and neighbours do not matter" if self.is_right else "WRONG"
        moved = f"future {self.future:.1e}, padding {self.padding:.1e}, neighbours {self.neighbours:.1e}"
        return f"mask self-test: {verdict} (logits move by: {moved})"


@torch.no_grad()
def probe_masks(model: Any, *, seed: int = 0) -> SelfTest:
    """Run a few made-up ids through the model, perturbed where nothing may change."""
    was_training = model.training
    model.eval()
    try:
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.config.vocab_size
        samples = [torch.randint(vocabulary, (n,), generator=generator).to(model.device) for n in _LENGTHS]
        alone = [model(input_ids=ids[None]).logits[0].float() for ids in samples]
        scale = max(float(logits.abs().max()) for logits in alone) or 1.0
        half = alone[0].dtype != next(model.top.parameters()).dtype
        return SelfTest(
            future=_future(model, samples) / scale,
            padding=_padding(model, samples, vocabulary) / scale,
            neighbours=_neighbours(model, samples, alone) / scale,
            limit=_HALF if half else max(_EXACT, min(_ROUNDINGS * _rounding(model, samples, alone) / scale, _MOST)),
        )
    finally:
        model.train(was_training)


def refuse_wrong_masks(model: Any) -> SelfTest:
    """The self-test of a model that may be trained; `LawError` for one that is not causal or mixes samples."""
    found = probe_masks(model)
    if not found.is_right:
        raise LawError(
            "this stitched model is not trained: a token sees what it must not see",
            seen=f"logits move by {found.future:.1e} with the future, {found.padding:.1e} with padding, "
            f"{found.neighbours:.1e} with neighbours, as a share of the largest; limit {found.limit:.0e}",
            do="give the tokenizer's 2-D mask to the whole model, never to its layers",
        )
    return found


def _future(model: Any, samples: list[Tensor]) -> float:
    ids, is_real = _pad(samples, left=False)
    whole = causality_violation(lambda given: model(input_ids=given, attention_mask=is_real).logits, ids, _AT)
    one = causality_violation(lambda given: model(input_ids=given).logits, ids[:1], _AT)
    return max(whole, one)


def _padding(model: Any, samples: list[Tensor], vocabulary: int) -> float:
    worst = 0.0
    for left in (False, True):
        ids, is_real = _pad(samples, left=left)
        other = torch.where(is_real.bool(), ids, (ids + 1) % vocabulary)
        before, after = (model(input_ids=given, attention_mask=is_real).logits for given in (ids, other))
        worst = max(worst, float((before - after).float()[is_real.bool()].abs().max()))
    return worst


def _neighbours(model: Any, samples: list[Tensor], alone: list[Tensor]) -> float:
    worst = 0.0
    for left in (False, True):
        ids, is_real = _pad(samples, left=left)
        logits = model(input_ids=ids, attention_mask=is_real).logits.float()
        found = [row[real.bool()] for row, real in zip(logits, is_real, strict=True)]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True)))
    return worst


def _rounding(model: Any, samples: list[Tensor], alone: list[Tensor]) -> float:
    """How far logits move when what the adapter gives is off in its last bits, as another order of a sum makes it."""
    generator = torch.Generator().manual_seed(1)

    def disturb(_module: Any, _given: Any, joined: Tensor) -> Tensor:
        off = torch.randn(joined.shape, generator=generator).to(joined)
        return joined + off * joined.abs().amax() * torch.finfo(joined.dtype).eps

    handle = model.adapter.register_forward_hook(disturb)
    try:
        moved = [model(input_ids=ids[None]).logits[0].float() for ids in samples]
    finally:
        handle.remove()
    return max(float((a - b).abs().max()) for a, b in zip(moved, alone, strict=True))


def _pad(samples: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """[B, L] ids and the tokenizer's mask: 1 where a cell is real."""
    width = max(len(ids) for ids in samples)
    ids, is_real = samples[0].new_zeros(len(samples), width), samples[0].new_zeros(len(samples), width)
    for row, sample in enumerate(samples):
        place = slice(width - len(sample), width) if left else slice(0, len(sample))
        ids[row, place], is_real[row, place] = sample, 1
    return ids, is_real
