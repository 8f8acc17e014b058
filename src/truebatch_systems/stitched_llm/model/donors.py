"""The two models a stitched one is made of: which are known, and how layers are taken out of them.

A donor is never changed: what is taken has modules and a configuration of its own, over the donor's very weights.

donor -> check_donor -> keep_bottom: embedding and layers [0:k] | keep_top: layers [j:], final norm, output layer
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.hf.load import load_model
from truebatch.hf.pretrained import load_tokenizer, without_chatter, without_dropout
from truebatch_systems.stitched_llm.data.retokenize import Spelling, spell_in

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Architectures (`model_type`) whose parts are called embed_tokens, layers, norm, rotary_emb and lm_head."""
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_DROPS = ("attention_dropout", "dropout", "hidden_dropout", "resid_dropout")


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """A causal language model that gives layers."""

    model: Any
    """A `...ForCausalLM` of transformers."""
    name: str
    """The folder it came from, or what it is called in messages."""
    tokenizer: Any = None

    @property
    def depth(self) -> int:
        """How many decoder layers it has."""
        return len(self.model.model.layers)

    @property
    def width(self) -> int:
        """The width of its hidden states."""
        return int(self.model.config.hidden_size)


def open_donor(source: Path | nn.Module, *, what: str) -> Donor:
    """A donor from a folder of save_pretrained, with its tokenizer, or from memory; other architectures are refused."""
    if isinstance(source, nn.Module):
        check_donor(source, what)
        return Donor(source, what)
    with without_chatter():
        model = load_model(source)
    check_donor(model, str(source))
    return Donor(model, str(source), load_tokenizer(source, None))


def spelling_between(bottom: Donor, top: Donor) -> Spelling:
    """How the bottom donor spells the tokens of the top one; both need their tokenizers."""
    for role, donor in (("bottom", bottom), ("top", top)):
        if donor.tokenizer is None:
            raise ConfigError(
                f"the {role} donor came without its tokenizer, which says how it reads a text",
                seen=donor.name,
                do="give the folder of the donor, or Donor(model, name, tokenizer)",
            )
    return spell_in(bottom.tokenizer, top.tokenizer, size=int(top.model.config.vocab_size))


def check_donor(model: Any, name: str) -> None:
    """Refuse what layers cannot be taken out of, by name."""
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    inner: Any = getattr(model, "model", None)
    missing = [part for part in _PARTS if not hasattr(inner, part)]
    if kind not in FAMILIES or missing or not hasattr(model, "lm_head"):
        raise ConfigError(
            f"{name} is no donor: its architecture is not one that layers can be taken out of",
            seen=f"{type(model).__name__}, model_type={kind!r}" + (f", without {missing}" if missing else ""),
            do=f"use a causal language model of one of: {', '.join(FAMILIES)}",
        )
    if kind.startswith("gemma") and not hasattr(inner.embed_tokens, "embed_scale"):
        raise ConfigError(
            f"{name}: this version of transformers scales hidden states of Gemma inside the model",
            seen=f"{type(inner.embed_tokens).__name__} without embed_scale",
            do="use a version of transformers in which the embedding scales itself",
        )


def keep_bottom(model: Any, layers: int) -> Any:
    """The embedding and the first `layers` layers as a base model: its output is the residual stream after them."""
    base = _copy_over_weights(model.model)
    _keep_layers(base, 0, layers)
    base.norm = nn.Identity()
    return base


def keep_top(model: Any, first: int) -> tuple[Any, nn.Linear]:
    """The layers from `first` on with the final norm as a base model that takes `inputs_embeds`, and the output layer."""
    base = _copy_over_weights(model.model)
    _keep_layers(base, first, len(base.layers))
    base.embed_tokens = None
    linear = model.lm_head
    head = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    head.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    if linear.bias is not None:
        head.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return base, head


def _copy_over_weights(base: Any) -> Any:
    """Modules and configuration copied, weights shared and frozen: freezing or moving the copy leaves the donor alone."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in base.parameters()}
    memo |= {id(b): b for b in base.buffers()}
    copied = copy.deepcopy(base, memo)
    without_dropout(copied.config)
    for module in copied.modules():
        for name in _DROPS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return copied.eval()


def _keep_layers(base: Any, first: int, stop: int) -> None:
    base.layers = nn.ModuleList(list(base.layers)[first:stop])
    config = base.config
    config.num_hidden_layers = stop - first
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[first:stop]
    for number, layer in enumerate(base.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # the cache and the mask are addressed by it


def check_cut(bottom: Donor, top: Donor, cut_bottom: int, cut_top: int) -> None:
    """Refuse cut points that a donor does not have."""
    if not 1 <= cut_bottom <= bottom.depth:
        raise ConfigError(
            "cut_bottom is how many layers are kept from the bottom donor",
            seen=f"cut_bottom={cut_bottom}, {bottom.name} has {bottom.depth} layers",
            do=f"give a number from 1 to {bottom.depth}",
        )
    if not 0 <= cut_top < top.depth:
        raise ConfigError(
            "cut_top is the first layer used of the top donor",
            seen=f"cut_top={cut_top}, {top.name} has {top.depth} layers",
            do=f"give a number from 0 to {top.depth - 1}",
        )


def weights_hash(*parts: nn.Module) -> str:
    """A hash of all weights of some modules: names, dtypes and every byte."""
    digest = hashlib.blake2b(digest_size=16)
    for number, part in enumerate(parts):
        for name, value in sorted(part.state_dict().items()):
            digest.update(f"{number}.{name} {value.dtype} {tuple(value.shape)}\0".encode())
            digest.update(_raw(value))
    return digest.hexdigest()


def _raw(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def describe_donors(donors: Iterable[tuple[str, Donor]]) -> list[tuple[str, ...]]:
    """A table: what each donor is made of, one row a fact."""
    named = list(donors)
    facts = [_facts(donor) for _, donor in named]
    return [("", *(role for role, _ in named))] + [(name, *(f[name] for f in facts)) for name in facts[0]]


def _facts(donor: Donor) -> dict[str, str]:
    config = donor.model.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or {k: v.get("rope_theta") for k, v in rope.items() if isinstance(v, dict)}
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * donor.depth
    return {
        "donor": donor.name,
        "architecture": str(config.model_type),
        "layers": str(donor.depth),
        "width": str(donor.width),
        "heads": f"{config.num_attention_heads} (keys {config.num_key_value_heads})",
        "rope base": str(theta),
        "vocabulary": f"{config.vocab_size:,}",
        "sliding layers": str(sum(kind == "sliding_attention" for kind in kinds)),
        "dtype": str(next(donor.model.parameters()).dtype).removeprefix("torch."),
        "attention": str(config._attn_implementation),
        "parameters": f"{sum(p.numel() for p in donor.model.parameters()):,}",
    }
