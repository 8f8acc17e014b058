"""Model folders as a user has them: tiny, random, with a tokenizer trained on a few words."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from truebatch.hf.pretrained import without_chatter

TEXT = ["what is the colour of the grass and the sky", "green", "blue", "red and white", "hello", "草是绿色的"] * 4
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"]

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% else %}...{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As templates that leave the thoughts of earlier answers out."""
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


@cache
def _inner() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <eos> $B:1", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return inner


def tokenizer(template: str | None = PLAIN) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=_inner(),
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def model_folder(folder: Path, kind: str = "llama", template: str | None = PLAIN) -> Path:
    torch.manual_seed(0)
    made = tokenizer(template)
    vocabulary = len(made)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary, **sizes, max_position_embeddings=96, attention_dropout=0.1,
                pad_token_id=0, eos_token_id=1, bos_token_id=2,
            )
        )  # fmt: skip
    elif kind == "bert":
        model = BertForSequenceClassification(
            BertConfig(vocab_size=vocabulary, **sizes, max_position_embeddings=96, pad_token_id=0)
        )
    else:
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
    with without_chatter():
        model.save_pretrained(folder)
        made.save_pretrained(folder)
    return folder


def write_lines(file: Path, samples: list[Any]) -> Path:
    file.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples), encoding="utf-8")
    return file


def chat(*contents: str) -> dict[str, Any]:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]}


def chats(number: int = 12) -> list[dict[str, Any]]:
    return [chat("what is the colour of the " + "grass " * (1 + i % 5), "green " * (1 + i % 3)) for i in range(number)]
