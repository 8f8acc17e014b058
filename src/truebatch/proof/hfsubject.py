"""A Hugging Face model put to the proof: its head says how it is fed, read and summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from truebatch.hf.heads import head_of
from truebatch.hf.limits import check_sample
from truebatch.hf.objectives import HeadObjective
from truebatch.hf.samples import make_samples, plain_ids
from truebatch.proof.subjects import Subject, model_subject

DEFAULT_LENGTHS = (5, 70, 9, 2, 37, 13, 19, 24)
"""Short beside long; the longest is beyond the windows and chunks of small models."""


def hf_subject(
    model: nn.Module, samples: Sequence[Any], *, packed_rows: Literal["packed", "block"] = "packed"
) -> Subject:
    """The samples (lists of token ids, or dicts as the head's fields name them) through a model with a known head."""
    given = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    head = head_of(model, given[0] if given else None)
    objective = HeadObjective(head=head, packed_rows=packed_rows, plain_alone=True)
    for at, sample in enumerate(given):
        check_sample(model, head, sample, at)
    prepared = [head.prepare(sample) for sample in given]
    subject = model_subject(model, objective, prepared, head.fields, causal=head.kind.name == "causal_lm")
    return replace(subject, plain_values={"input_ids": plain_ids(model).tolist()})


def random_samples(model: nn.Module, seed: int = 0) -> list[dict[str, Any]]:
    """Valid samples of different lengths for a model, made up."""
    return list(make_samples(model, DEFAULT_LENGTHS, seed))
