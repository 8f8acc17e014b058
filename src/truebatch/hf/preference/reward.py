"""Rewards of completions from a model with a head for classes, packed, prompts shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.hf.forward_inputs import inner_model
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.preference.logprobs import CELLS, as_ids, bare_model, plan_rows, refuse_lost_attention
from truebatch.hf.preference.tree_rows import CompletionRows, attending, call_inputs
from truebatch.planning.trees.prefix_trees import Share, Tokens


def reward(
    model: nn.Module,
    prompts: Sequence[Tokens | Tensor],
    completions: Sequence[Tokens | Tensor],
    *,
    share: Share = "prompts",
    cells: int = CELLS,
) -> Tensor:
    """[N] rewards of `completions` after `prompts`, both token ids, each as if it were alone; [N, labels] where the
    head has several. Differentiable; rows, `share` and `cells` are those of `truebatch.logprobs`.

    >>> import truebatch as tb
    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> tb.reward(tiny_model("llama", "sequence_classification"), [[5, 6], [5, 6]], [[8, 9], [10]]).shape[0]
    2
    """
    inner = bare_model(model)
    head = head_of(inner)
    if head.kind.name != "sequence_classification":
        raise ConfigError(
            "rewards need a model with a head for classes",
            seen=f"{type(inner).__name__}, a head of kind {head.kind.name!r}",
            do="load it with AutoModelForSequenceClassification, num_labels=1",
        )
    texts, answers = as_ids(prompts), as_ids(completions)
    plan = plan_rows(head, inner, texts, answers, share=share, cells=cells)
    parts = [read_rewards(head, inner, rows) for rows in plan.rows]
    order = [one for rows in plan.rows for one in rows.completions]
    back = torch.empty(len(order), dtype=torch.int64)
    back[order] = torch.arange(len(order))
    found = torch.cat(parts)[back.to(parts[0].device)]
    return found[:, 0] if found.shape[1] == 1 else found


def read_rewards(head: ModelHead, model: Any, rows: CompletionRows) -> Tensor:
    """[n, labels] of the completions of these rows."""
    refuse_lost_attention(model, rows)
    given = call_inputs(head, model, rows)
    if not head.pools_last:
        given["input_ids"] = rows.input_ids.masked_fill(~rows.segments.is_real, head.pad_id)
        whole: Tensor = model(**given).logits
        return whole
    with attending(head, model, rows):
        hidden = inner_model(model)(**given)[0]
    scores: Tensor = model.score(hidden.flatten(0, 1).index_select(0, rows.last))
    return scores
