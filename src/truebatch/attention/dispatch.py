"""Which attention kernel serves a call: one table and one pure function, so that tests can simulate any GPU."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kernel = Literal["planned", "varlen", "plain", "block", "per_segment"]

HALF = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)
HOPPER = (9, 0)
MAX_VARLEN_HEAD = 256
MAX_PLANNED_HEAD = 128
PAIRS_PER_CALL = 2**20
"""Dense pairs a GPU computes in about the time it takes to launch one more attention call and its backward."""


class Facts(NamedTuple):
    """Everything the choice of a kernel depends on; created for every call, so it must be cheap."""

    device: str
    """Device type: cpu, cuda, mps, ..."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None elsewhere."""
    dtype: torch.dtype = torch.float32
    head_size: int = 64
    causal: bool = True
    has_window: bool = False
    has_dropout: bool = False
    has_bias: bool = False
    reshapes_scores: bool = False
    """A softcap or attention sinks: SDPA cannot compute them, only the written-out formula can."""
    num_segments: int = 1
    pairs: int = 1
    """Sum of squared sample lengths: what a loop over the samples computes."""
    dense_pairs: int = 1
    """B*T*T: what one call over whole rows computes."""
    rows_are_samples: bool = False
    """One sample per row, starting at the first cell: any padding is on the right."""
    has_padding: bool = False
    compiling: bool = False
    """Inside torch.compile, where a loop over host lengths would recompile for every micro-batch."""
    varlen_in_torch: bool = True
    varlen_has_window: bool = True
    plans_in_cudnn: bool = False
    """cuDNN's Python package is installed, so that its plans can be cached."""


def choose_kernel(facts: Facts) -> Kernel:
    """Choose the first row of the table that matches; the last one always does.

    planned      no mask, no wasted pairs, no dropout, no bias, no window: cuDNN's kernel on Hopper and newer
    varlen       the same with windows and wider heads: torch's own kernel, Ampere and newer in half precision
    plain        one SDPA call without a mask: full rows, or right padding under a causal rule with little of it
    block        one call with a dense mask: static shapes under torch.compile, or very many short segments on a GPU
    per_segment  one SDPA call per sample (equal lengths together): everything else, on any device
    """
    if _varlen_fits(facts):
        return "planned" if _plan_fits(facts) else "varlen"
    if _plain_fits(facts):
        return "plain"
    if facts.compiling or _loop_is_slower(facts):
        return "block"
    return "per_segment"


def _varlen_fits(facts: Facts) -> bool:
    modern = facts.device == "cuda" and facts.capability is not None and facts.capability >= AMPERE
    offered = facts.varlen_in_torch and (facts.varlen_has_window or not facts.has_window)
    in_range = facts.dtype in HALF and facts.head_size <= MAX_VARLEN_HEAD
    asks_for_more = facts.has_dropout or facts.has_bias or facts.reshapes_scores
    return modern and offered and in_range and not asks_for_more


def _plan_fits(facts: Facts) -> bool:
    modern = facts.capability is not None and facts.capability >= HOPPER
    return facts.plans_in_cudnn and modern and not facts.has_window and facts.head_size <= MAX_PLANNED_HEAD


def _plain_fits(facts: Facts) -> bool:
    simple = not (facts.has_window or facts.has_bias or facts.reshapes_scores)
    needs_no_mask = facts.rows_are_samples and (facts.causal or not facts.has_padding)
    return simple and needs_no_mask and (facts.dense_pairs <= 2 * facts.pairs or facts.compiling)


def _loop_is_slower(facts: Facts) -> bool:
    return facts.device != "cpu" and facts.dense_pairs <= PAIRS_PER_CALL * facts.num_segments
