"""The donors of somebody who has none: two tiny models of different families, trained here on made-up text.

They are trained once and kept in the cache folder; whoever needs them again finds them there.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.pretrained import without_chatter
from truebatch.io.atomic_files import atomic_folder
from truebatch.language.console import say
from truebatch.planning.lengths.measured_values import cache_folder
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import broadcast_from_rank0, num_ranks, rank
from truebatch.training.trainer import train
from truebatch_systems.stitched_llm.data.toy_corpus import make_texts, make_tokenizer, words, write_corpus

WAY = "1"
"""Raised whenever the same settings would make other donors."""
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bottom": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "top": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
}


def embedded_folder(*, samples: int, steps: int, seed: int) -> Path:
    """Where text, tokenizer and donors of these settings are; text and tokenizer are written if they are not there."""
    key = hashlib.blake2b(f"{WAY} {samples} {steps} {seed} {words()}".encode(), digest_size=8).hexdigest()
    folder = cache_folder() / f"stitched-{key}"
    write_corpus(folder, samples=samples, seed=seed)
    if not (folder / "tokenizer").is_dir():
        with atomic_folder(folder / "tokenizer", keep_existing=True) as draft:
            _save_tokenizer(draft)
    return folder


def ensure_donors(folder: Path, *, steps: int, seed: int) -> None:
    """Train the two donors into `bottom` and `top`, unless they are there: all ranks together, and the first one saves."""
    for number, role in enumerate(_FAMILIES):
        if broadcast_from_rank0((folder / role).is_dir()):
            continue
        if rank() == 0:
            say(f"the {role} donor is trained first, {steps} steps, and kept in {folder / role}", file=sys.stderr)
        model = train_donor(role, steps=steps, seed=seed * 2 + number)
        if rank() == 0:
            with atomic_folder(folder / role, keep_existing=True) as draft:
                _save(model, draft)
    if num_ranks() > 1:
        dist.barrier()


def are_trained(folder: Path) -> bool:
    """True where both donors are."""
    return all((folder / role).is_dir() for role in _FAMILIES)


def new_donor(role: str, *, seed: int) -> Any:
    """A tiny donor that has learned nothing."""
    torch.manual_seed(seed)
    return _FAMILIES[role][1](_config(role))


def train_donor(role: str, *, steps: int, seed: int) -> nn.Module:
    """One tiny donor, trained on made-up text of its own seed; the same arguments give the same weights."""
    model: nn.Module = new_donor(role, seed=seed)
    tokenizer = make_tokenizer()
    texts = make_texts(32 * min(steps, 200), seed=1000 + seed)
    head = head_of(model)
    samples = [head.prepare({"input_ids": [*tokenizer(text)["input_ids"], 0]}) for text in texts]
    settings = TrainConfig(
        epochs=steps, max_steps=steps, samples_per_step=32, layout="packed", cells=1024, learning_rate=3e-3,
        schedule="cosine", warmup_steps=min(20, steps // 10), seed=seed, stuck_seconds=None, devices=num_ranks(),
    )  # fmt: skip
    result = train(model, HeadObjective(head=head), TrainData(samples=samples, fields=head.fields), settings)
    result.raise_if_interrupted()  # half a donor is none
    return model.cpu().eval()


def _config(role: str) -> Any:
    config_type, _, sizes = _FAMILIES[role]
    return config_type(
        vocab_size=len(words()), intermediate_size=2 * sizes["hidden_size"], max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False, **sizes,
    )  # fmt: skip


def _save_tokenizer(folder: Path) -> None:
    """With the configuration of the bottom donor, so that the folder is read like that of a model."""
    make_tokenizer().save_pretrained(folder)
    _config("bottom").save_pretrained(folder)


def _save(model: Any, folder: Path) -> None:
    with without_chatter():
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
