"""A trained model as a folder that plain transformers loads: GPT-2's shape, and a tokenizer that cuts text alike.

model -> config.json, model.safetensors;  vocabulary -> tokenizer.json, tokenizer_config.json, vocabulary.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor

from truebatch.io.atomic_files import apply_umask, write_text
from truebatch_systems.chinese_gpt.data.characters import CHINESE, HAN
from truebatch_systems.chinese_gpt.model.model import NORM_EPS, Block, ChineseGPT
from truebatch_systems.chinese_gpt.tokenizer.segmenter import BpeSegmenter, BuiltinSegmenter
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, PAD, SPECIAL, UNK, Vocab

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('用户：' if message['role'] == 'user' else '助手：') + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '助手：' }}{% endif %}"
)


def export_model(model: ChineseGPT, folder: Path) -> None:
    """Write a folder for `AutoModelForCausalLM` and `AutoTokenizer`; truebatch is not needed to use it."""
    vocab = model.vocab
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in gpt2_weights(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    apply_umask(folder)
    _write(folder / "config.json", gpt2_config(model))
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write(folder / "generation_config.json", ends)
    _write(folder / "tokenizer.json", tokenizer_definition(vocab))
    _write(folder / "tokenizer_config.json", _tokenizer_settings(model, vocab))
    vocab.save(folder / "vocabulary.json")
    write_text(folder / "README.md", _explain(vocab))


def gpt2_config(model: ChineseGPT) -> dict[str, Any]:
    """The configuration of `GPT2LMHeadModel` that computes the same."""
    shape = model.shape
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shape.vocabulary,
        "n_positions": shape.max_seq_len,
        "n_embd": shape.embedding_dim,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.hidden_dim,
        "activation_function": "relu",
        "layer_norm_epsilon": NORM_EPS,
        "tie_word_embeddings": False,
        "resid_pdrop": shape.dropout,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
    }


def gpt2_weights(model: ChineseGPT) -> dict[str, Tensor]:
    """All weights by GPT-2's names; its linear layers store the transpose, and have biases where ours have none."""
    out = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.places.weight,
        "transformer.ln_f.weight": model.norm_out.weight,
        "transformer.ln_f.bias": model.norm_out.bias,
        "lm_head.weight": model.head.weight,
    }
    for at, block in enumerate(model.blocks):
        out |= {f"transformer.h.{at}.{name}": value for name, value in _block_weights(cast(Block, block)).items()}
    return out


def _block_weights(block: Block) -> dict[str, Tensor]:
    mix_in, mix_out = block.mix_in.weight, block.mix_out.weight
    return {
        "ln_1.weight": block.norm_attention.weight,
        "ln_1.bias": block.norm_attention.bias,
        "attn.c_attn.weight": mix_in.T,
        "attn.c_attn.bias": mix_in.new_zeros(mix_in.shape[0]),
        "attn.c_proj.weight": mix_out.T,
        "attn.c_proj.bias": mix_out.new_zeros(mix_out.shape[0]),
        "ln_2.weight": block.norm_feed.weight,
        "ln_2.bias": block.norm_feed.bias,
        "mlp.c_fc.weight": block.widen.weight.T,
        "mlp.c_fc.bias": block.widen.bias,
        "mlp.c_proj.weight": block.shrink.weight.T,
        "mlp.c_proj.bias": block.shrink.bias,
    }


def tokenizer_definition(vocab: Vocab) -> dict[str, Any]:
    """`tokenizer.json`: the same words and ids, with BOS before a text.

    jieba's words cannot be written down this way: that tokenizer takes words, see the folder's README.
    """
    bos = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}
    special = {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}
    parts = {
        "builtin": _unigram_parts,
        "bpe": _byte_pair_parts,
        "jieba": _word_parts,
    }[vocab.backend](vocab)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, word) for i, word in enumerate(SPECIAL)],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {SPECIAL[BOS]: special},
        },
        **parts,
    }


def _unigram_parts(vocab: Vocab) -> dict[str, Any]:
    """The likeliest path through the words of each piece, from the same scores."""
    segmenter = vocab.segmenter
    assert isinstance(segmenter, BuiltinSegmenter)
    scores = [[word, 0.0 if i < len(SPECIAL) else segmenter.score(word)] for i, word in enumerate(vocab.words)]
    pieces = f"[{HAN}]+|[A-Za-z0-9]+|[\\s\\S]"
    split = {"type": "Split", "pattern": {"Regex": pieces}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": _normalizer(),
        "pre_tokenizer": split,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": scores, "byte_fallback": False},
        "decoder": {"type": "Fuse"},
    }


def _byte_pair_parts(vocab: Vocab) -> dict[str, Any]:
    """The byte pairs as they were learned, with our ids."""
    assert isinstance(vocab.segmenter, BpeSegmenter)
    learned = json.loads(vocab.segmenter.definition)
    model = {**learned["model"], "vocab": {word: i for i, word in enumerate(vocab.words)}}
    return {
        "normalizer": _normalizer(),
        "pre_tokenizer": learned["pre_tokenizer"],
        "model": model,
        "decoder": learned["decoder"],
    }


def _word_parts(vocab: Vocab) -> dict[str, Any]:
    ids = {word: i for i, word in enumerate(vocab.words)}
    model = {"type": "WordLevel", "vocab": ids, "unk_token": SPECIAL[UNK]}
    return {"normalizer": None, "pre_tokenizer": None, "model": model, "decoder": {"type": "Fuse"}}


def _normalizer() -> dict[str, Any]:
    """What `characters.normalise` does, as patterns of the package `tokenizers`."""
    steps = [
        ("\\r\\n|\\r", "\n"),
        ("[^\\S\\n]+", " "),
        (" ?\\n[ \\n]*", "\n"),
        ("\\A\\s+|\\s+\\z", ""),
        (f"(?<=[{CHINESE}]) (?=[{CHINESE}])", ""),
    ]
    rules = [{"type": "Replace", "pattern": {"Regex": pattern}, "content": content} for pattern, content in steps]
    return {"type": "Sequence", "normalizers": rules}


def _added(i: int, word: str) -> dict[str, Any]:
    return {
        "id": i,
        "content": word,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer_settings(model: ChineseGPT, vocab: Vocab) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "unk_token": SPECIAL[UNK],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_max_length": model.shape.max_seq_len,
        "chat_template": CHAT_TEMPLATE,
        "vocabulary_hash": vocab.hash,
    }


def _explain(vocab: Vocab) -> str:
    text = "tokenizer(text, return_tensors='pt')"
    if vocab.backend == "jieba":
        text = "tokenizer(jieba.lcut(text, HMM=False), is_split_into_words=True, return_tensors='pt')"
    return f"""# A small Chinese GPT

Trained with truebatch; used with transformers alone. Words: {len(vocab):,}, cut by `{vocab.backend}`, hash {vocab.hash}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
text = "用户：你好助手："
ids = model.generate(**{text}, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```

Known text has the same tokens here as in training. Unknown characters side by side become one unknown word here.
`vocabulary.json` holds the words and how text is cut into them, for any other use.
"""


def _write(file: Path, value: Mapping[str, Any]) -> None:
    write_text(file, json.dumps(value, ensure_ascii=False, indent=1))
