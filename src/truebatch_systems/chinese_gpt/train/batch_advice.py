"""Rules of thumb as choices that explain themselves: how many samples, which width, which rate, and when not to batch.

lengths -> batch size by the number of samples, bucket width by their length, padding of every grouping -> lines
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints

FEW_SAMPLES = 50
RATE_ALONE = 1e-3
"""The learning rate for one sample per step."""
MAX_SEQ_LEN = 128


def batch_size_for(num_samples: int) -> int:
    """2 below 100 samples, 4 up to 500, 8 up to 1000, 16 above."""
    steps = ((100, 2), (500, 4), (1001, 8))
    return next((size for below, size in steps if num_samples < below), 16)


def bucket_width_for(lengths: Ints) -> int:
    """8 for samples below 50 tokens, 16 up to 100, 32 above; nine tenths of the samples decide."""
    usual = float(np.percentile(lengths, 90)) if len(lengths) else 0.0
    return 8 if usual < 50 else 16 if usual <= 100 else 32


def learning_rates_for(batch_size: int) -> tuple[float, float]:
    """0.001 for one sample per step, 0.001 to 0.002 for several."""
    return RATE_ALONE, RATE_ALONE * (1 if batch_size == 1 else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingShares:
    """Cells that hold no token, as a share, for one corpus and one number of samples per forward pass."""

    fixed: float
    """Every row as wide as the model allows."""
    dynamic: float
    """Random samples, every forward pass as wide as its longest."""
    bucketed: float
    """Samples of about one length together."""
    packed: float
    """Samples end to end."""


def padding_shares(
    lengths: Ints, batch_size: int, *, width: int | None = None, fixed: int = MAX_SEQ_LEN, seed: int = 0
) -> PaddingShares:
    """What each grouping wastes on these lengths, from the plans themselves."""
    width = bucket_width_for(lengths) if width is None else width
    every = {"samples": batch_size, "micro_batches_per_step": 1, "seed": seed}
    dynamic = PlanConfig(grouping="fixed", samples=batch_size, samples_per_step=batch_size, seed=seed)
    bucketed = PlanConfig(grouping="bucketed", bucket_width=width, **every)  # type: ignore[arg-type]
    packed = PlanConfig(layout="packed", samples=batch_size, samples_per_step=batch_size, seed=seed)
    wastes = [float(build_plan(lengths, config).statistics.waste) for config in (dynamic, bucketed, packed)]
    whole = 1.0 - float(lengths.sum()) / (len(lengths) * max(fixed, int(lengths.max())))
    return PaddingShares(fixed=whole, dynamic=wastes[0], bucketed=wastes[1], packed=wastes[2])


def reasons_not_to_batch(lengths: Ints) -> list[str]:
    """Why batches bring little on these samples, if they do."""
    reasons = []
    if len(lengths) < FEW_SAMPLES:
        reasons.append(f"only {len(lengths)} samples: below {FEW_SAMPLES}, batches bring little")
    if len(lengths) and lengths.min() == lengths.max():
        reasons.append(f"all samples have {lengths[0]} tokens: there is no padding to save, only speed to gain")
    return reasons


def advice_lines(lengths: Ints, *, batch_size: int, learning_rate: float, fixed: int) -> list[str]:
    """The choices in words, for the start of a run."""
    advised = batch_size_for(len(lengths))
    is_advised = f"chosen for {len(lengths):,} samples (--set train.batch_size=N changes it)"
    why = (
        is_advised
        if batch_size == advised
        else f"as asked for ({advised} would be chosen for {len(lengths):,} samples)"
    )
    width = bucket_width_for(lengths)
    shares = padding_shares(lengths, batch_size, width=width, fixed=fixed)
    low, high = learning_rates_for(batch_size)
    is_inside = low <= learning_rate <= high
    lines = [
        f"batch size {batch_size}: {why}",
        f"padding at {batch_size} samples per forward pass: fixed {fixed} {shares.fixed:.0%}, dynamic {shares.dynamic:.0%}, "
        f"bucketed (width {width}) {shares.bucketed:.0%}, packed {shares.packed:.0%}",
        f"learning rate {learning_rate:g}: {'within the advice' if is_inside else 'outside the advice'} for this batch size, "
        f"{low:g} to {high:g}",
    ]
    if batch_size > len(lengths):
        lines.append(f"{len(lengths)} samples are fewer than a batch of {batch_size}: every step is the whole epoch")
    return lines + [f"batching: {reason}; to look at single samples: --set train.true_batch=off"
                    for reason in reasons_not_to_batch(lengths)]  # fmt: skip
