"""Hostile model folders: configurations, weights, tokenizers and templates that lie or want to run code."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.hostile.making import CANARY, Hostile, entry, pickled, put, safetensors, torch_zip
from truebatch.hf.load import without_chatter
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch_systems.stitched_llm.data.toy_corpus import make_tokenizer

CODE = f"import os\nos.mkdir({CANARY!r})\n"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].mkdir('" + CANARY + "') }}"
VERIFY = ("verify", "model")
SCORE = ("score", "d.jsonl", "--model", "model", "--labels", "the=1,boat=0", "--no-check")
TRAIN = ("train", "hf", "--model", "model", "--data", "chats.jsonl", "--task", "causal_lm", "--dry-run")


@cache
def _saved() -> Path:
    """A tiny model with its tokenizer, to be spoilt in copies."""
    folder = Path(tempfile.mkdtemp()) / "model"
    tokenizer = make_tokenizer()
    with without_chatter():
        tiny_model("llama").save_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def models(spoil: Callable[[Path], object], command: Sequence[str] = VERIFY) -> Callable[[Path], Sequence[str]]:
    """A model folder with something wrong in it, and a command that loads it."""

    def make(folder: Path) -> Sequence[str]:
        shutil.copytree(_saved(), folder / "model")
        put(folder, "d.jsonl", '{"user": "the boat"}\n')
        turns = [{"role": "user", "content": "the boat"}, {"role": "assistant", "content": "the sail"}]
        put(folder, "chats.jsonl", json.dumps({"messages": turns}) + "\n")
        spoil(folder / "model")
        return command

    return make


def config(**values: Any) -> Callable[[Path], object]:
    return edited("config.json", **values)


def edited(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda folder: put(folder, name, json.loads((folder / name).read_text()) | values)


def changed(name: str, content: Any) -> Callable[[Path], object]:
    return lambda folder: put(folder, name, content)


def template(text: str) -> Callable[[Path], object]:
    return changed("chat_template.jinja", text)


def _remote_code(folder: Path) -> None:
    put(folder, "modeling_evil.py", CODE + "class Evil: pass\n")
    config(architectures=["Evil"], model_type="evil", auto_map={"AutoModel": "modeling_evil.Evil"})(folder)


def _remote_tokenizer(folder: Path) -> None:
    put(folder, "tokenization_evil.py", CODE + "class Evil: pass\n")
    auto = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    edited("tokenizer_config.json", tokenizer_class="Evil", auto_map=auto)(folder)


def _only_pickle(folder: Path, name: str, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    put(folder, name, content)


def _index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    put(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": {"w": "../../nowhere/x.safetensors"}})


MODELS = [
    Hostile("config: not JSON", models(changed("config.json", "{")), "config.json cannot be read"),
    Hostile("config: deep", models(changed("config.json", "[" * 100_000)), "config.json cannot be read"),
    Hostile("config: a list", models(changed("config.json", "[1]")), "config.json is not a configuration"),
    Hostile("config: GBK", models(changed("config.json", '{"a": "批次"}'.encode("gbk"))), "config.json"),
    Hostile("config: 17 MB", models(changed("config.json", b" " * (17 << 20))), "config.json is too large"),
    Hostile("config: a class that is a module", models(config(architectures=["logging"])), "names no class"),
    Hostile("config: a class that is a function", models(config(architectures=["pipeline"])), "names no class"),
    Hostile("config: a class that is a number", models(config(architectures=7)), "names no class"),
    Hostile("config: a class with markup", models(config(architectures=["\x1b[2J[red]"])), "names no class"),
    Hostile("config: code of others", models(_remote_code), "names no class"),
    Hostile("config: code of others, to train", models(_remote_code, TRAIN), "model"),
    Hostile("config: a negative width", models(config(hidden_size=-4)), "the model in model cannot be loaded"),
    Hostile("config: a text for a width", models(config(hidden_size="wide")), "model has no configuration"),
    Hostile("config: no heads", models(config(num_attention_heads=0)), "model has no configuration"),
    Hostile("config: a billion layers", models(config(num_hidden_layers=10**9)), "more than any model"),
    Hostile(
        "config: a billion layers, to train", models(config(num_hidden_layers=10**9), TRAIN), "more than any model"
    ),
    Hostile("config: another width", models(config(hidden_size=48)), "the model in model cannot be loaded"),
    Hostile(
        "weights: a pickle named .bin", models(lambda f: _only_pickle(f, "pytorch_model.bin", pickled())), "loaded"
    ),
    Hostile(
        "weights: torch.save in .bin", models(lambda f: _only_pickle(f, "pytorch_model.bin", torch_zip())), "loaded"
    ),
    Hostile(
        "weights: a pickle named .safetensors", models(changed("model.safetensors", pickled())), "cannot be loaded"
    ),
    Hostile(
        "weights: torch.save in .safetensors", models(changed("model.safetensors", torch_zip())), "cannot be loaded"
    ),
    Hostile(
        "weights: none", models(lambda f: (f / "model.safetensors").unlink()), "the model in model cannot be loaded"
    ),
    Hostile(
        "weights: others",
        models(changed("model.safetensors", safetensors({"w": entry([4], 0, 16)}, b"\0" * 16))),
        "weights",
    ),
    Hostile(
        "weights: lying offsets",
        models(changed("model.safetensors", safetensors({"w": entry([4], 0, 99)}, b"\0"))),
        "loaded",
    ),
    Hostile("weights: an index that leads outside", models(_index_outside), "no safetensors file of its folder"),
    Hostile("weights: a pickle, to score", models(changed("model.safetensors", pickled()), SCORE), "cannot be loaded"),
    Hostile("tokenizer: a pickle", models(changed("tokenizer.json", pickled()), SCORE), "tokenizer"),
    Hostile("tokenizer: deep", models(changed("tokenizer.json", "[" * 100_000), SCORE), "tokenizer"),
    Hostile(
        "tokenizer: other fields", models(changed("tokenizer.json", {"model": {"type": "Evil"}}), SCORE), "tokenizer"
    ),
    Hostile("tokenizer: code of others", models(_remote_tokenizer, SCORE), "tokenizer"),
    Hostile("tokenizer: a pickle, to train", models(changed("tokenizer.json", pickled()), TRAIN), "model"),
    Hostile("template: an escape from its sandbox, to score", models(template(ESCAPE), SCORE), "template", 3),
    Hostile("template: an escape from its sandbox, to train", models(template(ESCAPE), TRAIN), "template"),
    Hostile("template: not closed", models(template("{% for m in messages %}"), TRAIN), "template"),
    Hostile(
        "template: a huge range", models(template("{% for i in range(999999999) %}x{% endfor %}"), TRAIN), "template"
    ),
    Hostile("template: a file of the machine", models(template("{% include '/etc/passwd' %}"), TRAIN), "template"),
]
