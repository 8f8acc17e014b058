"""Two tiny donors with tokenizers that spell differently: ▁ for a space with pieces of one byte, and the letters of GPT-2."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = ["the boat sails over the lake", "a lake, a boat", "the café\nis over there", "boats sail", "the 🚤 sails"]
WORDS = ("the", "boat", "a", "lake", "over", "sail", "there", "is")


def sentencepiece_like():
    """▁the, with every byte as a piece of its own."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    merges = []
    for letter in "▁" + "".join(sorted(set("".join(WORDS)) | {",", "s"})):
        vocab[letter] = len(vocab)
    for word in WORDS:
        built = "▁"
        for letter in word:
            if built + letter not in vocab:
                vocab[built + letter] = len(vocab)
                merges.append((built, letter))
            built += letter
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level():
    """Ġthe, and every byte as a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0, **{letter: 1 + n for n, letter in enumerate(alphabet)}}
    merges = []
    for word in (*WORDS, "ing"):
        built = "Ġ" if word != "ing" else ""
        for letter in word:
            if built and built + letter not in vocab:
                vocab[built + letter] = len(vocab)
                merges.append((built, letter))
            built += letter
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|end|>", eos_token="<|end|>")


def write_donors(folder):
    """bottom/ and top/ as model folders, and texts.jsonl."""
    sizes = {"bottom": (sentencepiece_like(), 32, 3), "top": (byte_level(), 48, 4)}
    for role, (tokenizer, width, layers) in sizes.items():
        config = LlamaConfig(
            vocab_size=len(tokenizer) + 5, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.data.normal_(0.0, 0.5 if weight.shape[0] == config.vocab_size else weight.shape[1] ** -0.5)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    lines = [json.dumps({"text": text}) for text in TEXTS * 8]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder
