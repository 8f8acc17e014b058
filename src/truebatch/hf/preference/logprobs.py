"""Log-probabilities of completions under a language model: packed, prompts shared, differentiable.

prompts, completions -> trees -> rows -> hidden states -> log-probabilities in chunks -> per completion, as given
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truebatch.batch.chunked_log_probs import TokenLogProbs, chunked_log_probs
from truebatch.errors import BatchError, ConfigError
from truebatch.hf.attention.registration import NAME
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.heads.lm_head import hidden_states_of, output_layer_of
from truebatch.hf.preference.sharing import RowWay, row_way
from truebatch.hf.preference.tree_rows import CompletionRows, attending, call_inputs, packed_tree_row, padded_rows
from truebatch.planning.trees.pack_trees import plan_tree_rows
from truebatch.planning.trees.prefix_trees import PrefixTrees, Share, Tokens, grow_trees, tree_cells

_LOG = logging.getLogger(__name__)
CELLS = 16_384
"""Cells of one forward pass at most, unless the caller says otherwise."""

Reference = nn.Module | Literal["without_adapter"]
"""The model that log-probabilities are compared with: another one, or the same one with its adapters off."""


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """What a language model says of completions, in the order in which they were given."""

    tokens: list[Tensor]
    """[len] of every completion: the log-probability of each of its tokens."""
    entropies: list[Tensor] | None
    """[len] of every completion, where asked for: the entropy of the distribution each token was drawn from."""
    reference: list[Tensor] | None
    """[len] of every completion, where asked for: log-probabilities under the reference, without gradient."""
    cells: int
    """Cells that were computed, padding included."""
    copied_cells: int
    """What they would be with a copy of its prompt for each completion, without padding."""
    why_copied: str = ""
    """Why prompts were not shared; empty where they were."""

    @property
    def sums(self) -> Tensor:
        """[N] the log-probability of every completion."""
        return torch.stack([part.sum() for part in self.tokens])

    @property
    def reference_sums(self) -> Tensor:
        """[N] the same under the reference."""
        if self.reference is None:
            raise BatchError(
                "no reference was asked for", seen="reference=None", do="call logprobs with reference=a model"
            )
        return torch.stack([part.sum() for part in self.reference])


class RowsPlan(NamedTuple):
    """The forward passes of one call."""

    trees: PrefixTrees
    rows: list[CompletionRows]
    way: RowWay


class RowValues(NamedTuple):
    """What was read from one forward pass, end to end over its completions."""

    found: TokenLogProbs
    reference: Tensor | None


def logprobs(
    model: nn.Module,
    prompts: Sequence[Tokens | Tensor],
    completions: Sequence[Tokens | Tensor],
    *,
    entropy: bool = False,
    reference: Reference | None = None,
    temperature: float = 1.0,
    share: Share = "prompts",
    cells: int = CELLS,
) -> LogProbs:
    """Log-probabilities of `completions` [N] after `prompts` [N], both token ids, each as if it were alone.

    Prompts that are equal are laid out once in a packed row (`share="beginnings"`: so is what different prompts begin
    with; "nothing": a copy for each), and differentiated as if each completion had its own copy. A model that cannot
    share gets copies, and `why_copied` says why. `reference`: another model, or "without_adapter". `cells` bounds a
    forward pass, except for a single prompt with its completion.

    >>> import truebatch as tb
    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> found = tb.logprobs(tiny_model("llama"), [[5, 6, 7], [5, 6, 7]], [[8, 9], [10]])
    >>> [len(part) for part in found.tokens], found.cells, found.copied_cells
    ([2, 1], 6, 9)
    """
    inner, texts, answers = bare_model(model), as_ids(prompts), as_ids(completions)
    head = head_of(inner)
    if head.kind.name != "causal_lm":
        raise ConfigError(
            "log-probabilities of completions need a language model",
            seen=f"{type(inner).__name__}, a head of kind {head.kind.name!r}",
            do="load it with AutoModelForCausalLM; a classifier that gives rewards goes to truebatch.reward",
        )
    plan = plan_rows(head, inner, texts, answers, share=share, cells=cells)
    values = [_read(head, inner, rows, reference, temperature) for rows in plan.rows]
    return _in_order(plan, values, len(texts), entropy=entropy)


def as_ids(texts: Sequence[Tokens | Tensor]) -> list[Tokens]:
    """Token ids as Python lists."""
    found: list[Tokens] = [text.tolist() if isinstance(text, Tensor) else list(text) for text in texts]
    for at, text in enumerate(found):
        if not all(issubclass(kind, int) for kind in set(map(type, text))):
            raise BatchError(
                f"text {at} is not a list of token ids",
                seen=f"{text[:4]!r}",
                do="tokenize it first: tokenizer(text)['input_ids']",
            )
    return found


def bare_model(model: Any) -> Any:
    """The model of transformers in a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def plan_rows(
    head: ModelHead, model: nn.Module, prompts: list[Tokens], completions: list[Tokens], *, share: Share, cells: int
) -> RowsPlan:
    """The rows of a call, on the device of the model."""
    longest = max((len(a) + len(b) for a, b in zip(prompts, completions, strict=False)), default=0)
    way = row_way(head, model, longest=longest)
    if way.why and share != "nothing":
        _say_once(way.why)
    trees = grow_trees(prompts, completions, share=share if way.way == "shared" else "nothing")
    planned = plan_tree_rows(trees, cells)
    if way.way == "padded":
        rows = [padded_rows(prompts, completions, row) for row in planned]
    else:
        rows = [packed_tree_row(trees, row) for row in planned]
    device = next(model.parameters()).device
    return RowsPlan(trees, [row.to(device) for row in rows], way)


_said: set[str] = set()


def _say_once(why: str) -> None:
    if why not in _said:
        _said.add(why)
        _LOG.warning("truebatch: prompts are copied for each completion, because %s", why)


def _read(
    head: ModelHead, model: Any, rows: CompletionRows, reference: Reference | None, temperature: float
) -> RowValues:
    found = read_tokens(head, model, rows, temperature)
    if reference is None:
        return RowValues(found, None)
    other = model if isinstance(reference, str) else bare_model(reference)
    with torch.no_grad(), without_adapters(model) if isinstance(reference, str) else nullcontext():
        return RowValues(found, read_tokens(head_of(other), other, rows, temperature).log_probs)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """While open, the adapters of `model` add nothing."""
    layers: list[Any] = [part for part in model.modules() if _has_adapter(part)]
    if not layers:
        raise ConfigError(
            "the reference is the model without its adapter, and it has none",
            seen=type(model).__name__,
            do="give the reference as a model of its own",
        )
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _has_adapter(part: nn.Module) -> bool:
    """Layers of peft have this method; so have models of transformers, with another meaning."""
    return hasattr(part, "enable_adapters") and not isinstance(part, PreTrainedModel)


def read_tokens(head: ModelHead, model: Any, rows: CompletionRows, temperature: float = 1.0) -> TokenLogProbs:
    """Log-probability and entropy of each token of the rows' completions; logits are made in chunks where they can be."""
    refuse_lost_attention(model, rows)
    layer = output_layer_of(model, rows.input_ids)
    given = call_inputs(head, model, rows)
    with attending(head, model, rows):
        if layer is None:
            logits = model(**given).logits.flatten(0, 1)[rows.cells]
            return _whole(logits, rows.labels, temperature)
        with hidden_states_of(layer) as seen:
            model(**given)
    hidden = seen[0].flatten(0, 1).index_select(0, rows.cells)
    linear = layer.linear
    return chunked_log_probs(
        hidden, linear.weight, rows.labels, bias=linear.bias, rule=layer.rule, temperature=temperature
    )


def refuse_lost_attention(model: Any, rows: CompletionRows) -> None:
    """Raise where layers run again in backward, when the attention of these rows is no longer in place."""
    stays = not rows.is_packed or bool(_kept_open) or model.config._attn_implementation == NAME
    if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False) and not stays:
        raise ConfigError(
            "gradient checkpointing runs layers again in backward, and then with another attention",
            seen=f"attn_implementation={model.config._attn_implementation!r}",
            do="call model.set_attn_implementation('truebatch') once, before",
        )


_kept_open: list[bool] = []


@contextmanager
def kept_open(context: AbstractContextManager[None]) -> Iterator[None]:
    """`context` is kept open through backward: layers that run again find their rows."""
    with context:
        _kept_open.append(True)
        try:
            yield
        finally:
            _kept_open.pop()


def _whole(logits: Tensor, labels: Tensor, temperature: float) -> TokenLogProbs:
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_p = (logits.to(exact) / temperature).log_softmax(-1)
    return TokenLogProbs(log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))


def _in_order(plan: RowsPlan, values: Sequence[RowValues], number: int, *, entropy: bool) -> LogProbs:
    tokens: list[Tensor] = [torch.empty(0)] * number
    entropies, references = list(tokens), list(tokens)
    for rows, one in zip(plan.rows, values, strict=True):
        counts = list(rows.counts)
        values_of = (*one.found, one.found.log_probs if one.reference is None else one.reference)
        parts = [torch.split(part, counts) for part in values_of]
        for at, *found in zip(rows.completions, *parts, strict=True):
            tokens[at], entropies[at], references[at] = found
    has_reference = any(one.reference is not None for one in values)
    return LogProbs(
        tokens,
        entropies if entropy else None,
        references if has_reference else None,
        sum(rows.input_ids.numel() for rows in plan.rows),
        tree_cells(plan.trees).copied_cells,
        plan.way.why,
    )
