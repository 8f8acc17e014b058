"""The weights that were trained, in another engine: `truebatch verify engines.py:trained --against engines.py:served`."""

from truebatch.testing.tiny_hf.model import tiny_model


def trained():
    return tiny_model("llama")


def served():
    engine = tiny_model("llama")
    for layer in engine.model.layers:
        layer.self_attn.scaling = 1 / layer.self_attn.head_dim
    return engine


def served_mended():
    engine = tiny_model("llama")
    for layer in engine.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    return engine
