"""A Hugging Face model as the subject: its head defines inputs, outputs and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.id_checks import check_sample
from truebatch.testing.tiny_hf.random_samples import make_samples, plain_ids
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import alone
from truebatch.verification.determinism import quieted
from truebatch.verification.subjects.subject import Subject, model_subject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_LENGTHS = (5, 70, 9, 2, 37, 13, 1, 24)
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
    trained = HeadObjective(head=head)
    return replace(subject, objective=trained, plain_values={"input_ids": plain_ids(model).tolist()})


def random_samples(model: nn.Module, seed: int = 0) -> list[dict[str, Any]]:
    """Valid samples of different lengths for a model, made up."""
    config: PretrainedConfig = model.config
    text = config.get_text_config()
    known = [getattr(c, name, None) for c in (config, text) for name in _POSITIONS]
    most = min((n for n in known if isinstance(n, int) and n > 1), default=MANY)
    longest = max(DEFAULT_LENGTHS)
    for cap in (min(longest, most), *((most - 2, most - 4, most // 2) if most < MANY else ())):
        samples = list(make_samples(model, [min(n, cap) for n in DEFAULT_LENGTHS], seed))
        if most >= MANY or _runs(model, max(samples, key=lambda s: len(s["input_ids"]))):
            return samples
    return list(make_samples(model, DEFAULT_LENGTHS, seed))


_POSITIONS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "max_seq_len")
MANY = 80
"""Positions that need no second look: some tables begin to count at 2 or beyond."""


def _runs(model: nn.Module, sample: Mapping[str, Any]) -> bool:
    subject = hf_subject(model, [sample])
    try:
        with quieted(model, "eval"), torch.no_grad():
            subject.run(alone(subject.lengths).pieces[0])
    except (IndexError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return False
    return True
