"""What the benchmark of the training command runs on: a model folder with random weights, and a file of texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from truebatch.testing.length_distributions import Distribution, example_lengths

SPECIAL = ("<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandCase:
    """One model on one distribution of lengths."""

    model: str
    """A class of transformers."""
    sizes: dict[str, int]
    lengths: Distribution
    longest: int = 4096
    task: str = "causal_lm"
    lora: bool = False
    bench: str | None = None
    """The case of the `training` benchmark with the same shape and lengths."""
    is_tiny: bool = False


LLAMA = {
    "num_hidden_layers": 22, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "vocab_size": 32000,
}  # fmt: skip
QWEN = {
    "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936,
}  # fmt: skip
BERT = {
    "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    "vocab_size": 30522,
}  # fmt: skip
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 352, "vocab_size": 1024,
}  # fmt: skip
CASES = {
    "llama-1.1b/chat": CommandCase(model="LlamaForCausalLM", sizes=LLAMA, lengths="chat", bench="llama-1.1b/chat"),
    "llama-1.1b/patient": CommandCase(
        model="LlamaForCausalLM", sizes=LLAMA, lengths="patient", bench="llama-1.1b/patient"
    ),
    "qwen2-0.5b/chat": CommandCase(model="Qwen2ForCausalLM", sizes=QWEN, lengths="chat", bench="qwen2-0.5b/chat"),
    "bert-110m/chat": CommandCase(
        model="BertForSequenceClassification", sizes=BERT, lengths="chat", longest=512, task="sequence_classification"
    ),
    "llama-8b-lora/chat": CommandCase(model="LlamaForCausalLM", sizes=LLAMA_8B, lengths="chat", lora=True),
    "llama-tiny/chat": CommandCase(model="LlamaForCausalLM", sizes=TINY, lengths="chat", longest=512, is_tiny=True),
    "llama-tiny/patient": CommandCase(
        model="LlamaForCausalLM", sizes=TINY, lengths="patient", longest=512, is_tiny=True
    ),
    "bert-tiny/chat": CommandCase(
        model="BertForSequenceClassification", lengths="chat", longest=512, task="sequence_classification",
        sizes={name: size for name, size in TINY.items() if name != "num_key_value_heads"}, is_tiny=True,
    ),
}  # fmt: skip


def write_case(case: CommandCase, folder: Path, *, samples: int, device: str) -> None:
    """`model/`, as a user would have it, and `texts.jsonl`, with a label where the task has one."""
    _write_model(case, folder / "model", device)
    random = np.random.default_rng(77)
    lengths = np.clip(example_lengths(case.lengths, samples, seed=77), 4, case.longest - 2)
    with (folder / "texts.jsonl").open("w") as file:
        for at, length in enumerate(lengths):
            words = " ".join(f"w{i}" for i in random.integers(0, case.sizes["vocab_size"] - len(SPECIAL), length))
            label = {"label": "even" if at % 2 == 0 else "odd"} if case.task != "causal_lm" else {}
            file.write(json.dumps({"text": words, **label}) + "\n")


def _write_model(case: CommandCase, folder: Path, device: str) -> None:
    model_type = getattr(transformers, case.model)
    settings = {**case.sizes, "max_position_embeddings": max(case.longest, 512)}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2} if case.task == "causal_lm" else {}
    config = model_type.config_class(**settings)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model_type(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    if device == "cuda":
        torch.cuda.empty_cache()
    vocabulary = {word: at for at, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{i}": i + len(SPECIAL) for i in range(case.sizes["vocab_size"] - len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
