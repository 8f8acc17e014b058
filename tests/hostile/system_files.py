"""Hostile files of the systems and of scoring: pictures, benchmarks, corpora, tables of events, samples to judge."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tests.hostile.making import CANARY, Hostile, pickled, png, put
from truebatch.planning.lengths.image_size import measure_images
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab
from truebatch_systems.vlm_pruning.config import DatasetSettings
from truebatch_systems.vlm_pruning.data.datasets import load_split

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(x) (%pipe%mkdir " + CANARY.encode() + b") file\n"


def _saved(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, kind, **options)
    return file.getvalue()


def _huge_jpeg() -> bytes:
    data = bytearray(_saved("JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def pictured(name: str, content: bytes) -> Callable[[Path], Sequence[str]]:
    """A picture in a sample to judge."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, name, content)
        put(folder, "d.jsonl", json.dumps({"id": "sample-7", "user": "what?", "image": name}) + "\n")
        return ["score", "d.jsonl", "--model", "scripted", "--yesno", "--no-check", "--out", "run"]

    return make


def measured(make_picture: Callable[[Path], object]) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        make_picture(folder / "a.png")
        return lambda: measure_images([folder / "a.png"])

    return make


def judged(content: bytes | str, name: str = "d.jsonl") -> Callable[[Path], Sequence[str]]:
    """A file of samples to judge."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, name, content)
        return ["score", name, "--model", "scripted", "--yesno", "--no-check", "--out", "run"]

    return make


RECORD = {"subset": "physical", "edit_instruction_en": "make it red"}
PROMPT = {"physical": {"system_prompt": "s", "user_prompt_template": "{edit_instruction}"}}


def benchmark(content: Any, template: str = "{edit_instruction}") -> Callable[[Path], Sequence[str]]:
    """A benchmark file with its settings."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, "b.json", content)
        (folder / "edited").mkdir()
        prompts = {"physical": {"system_prompt": "s", "user_prompt_template": template}}
        settings = {
            "benchmark": {"data_path": "b.json"}, "prompts": prompts,
            "diffusion_model": {"type": "folder", "params": {"folder": "edited"}},
            "reward_model": {"type": "transformers", "params": {"model_name": "judge"}},
        }  # fmt: skip
        put(folder, "b.yaml", settings)
        return ["vl_reward", "validate", "--config", "b.yaml"]

    return make


def record(**values: Any) -> list[dict[str, Any]]:
    return [RECORD | {"src_img_b64": base64.b64encode(_saved("PNG")).decode()} | values]


def pixels(data: bytes) -> list[dict[str, Any]]:
    return record(src_img_b64=base64.b64encode(data).decode())


def linted(content: bytes | str) -> Callable[[Path], Sequence[str]]:
    def make(folder: Path) -> Sequence[str]:
        put(folder, "texts.json", content)
        return ["chinese_gpt", "lint", "texts.json"]

    return make


def stays(content: bytes | str, name: str = "events.csv") -> Callable[[Path], Sequence[str]]:
    def make(folder: Path) -> Sequence[str]:
        put(folder, name, content)
        return ["seqset_vae", "validate", name]

    return make


def vocabulary(content: Any) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        path = put(folder, "vocab.json", content)
        return lambda: Vocab.load(path)

    return make


def questions(content: str) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        path = put(folder, "q.jsonl", content)
        return lambda: load_split(DatasetSettings(name=str(path)), "train")

    return make


HEADER = "patient,minute,variable,value\n"
SYSTEMS = [
    Hostile("picture: 50,000 x 50,000 pixels", pictured("a.png", png(50_000, 50_000, rows=1)), "too_many_pixels", 3),
    Hostile("picture: a JPEG that claims four billion", pictured("a.jpg", _huge_jpeg()), "too_many_pixels", 3),
    Hostile("picture: cut off", pictured("a.jpg", _saved("JPEG")[:-60]), "decode/truncated_image", 3),
    Hostile("picture: no pixels", pictured("a.png", png(0, 0)), "decode/", 3),
    Hostile("picture: a pickle", pictured("a.png", pickled()), "decode/unreadable_image", 3),
    Hostile("picture: PostScript with a command", pictured("a.png", POSTSCRIPT), "decode/unreadable_image", 3),
    Hostile("picture: a page of HTML", pictured("a.png", b"<script>alert(1)</script>"), "decode/unreadable_image", 3),
    Hostile("picture: an icon, which is not read", pictured("a.ico", _saved("ICO")), "decode/unreadable_image", 3),
    Hostile("picture: a pipe", measured(os.mkfifo), "a.png is not a readable image"),
    Hostile("picture: a folder", measured(Path.mkdir), "a.png is not a readable image"),
    Hostile(
        "picture: an endless device", measured(lambda p: p.symlink_to("/dev/zero")), "a.png is not a readable image"
    ),
    Hostile("samples: every line broken", judged('{"user": \n[1, 2\nnot json\n'), "3 failed", 3),
    Hostile("samples: half a character", judged('{"user": "\\ud83d"}\n'), "read/not_text", 3),
    Hostile("samples: NUL", judged('{"user": "a\\u0000b"}\n'), "read/not_text", 3),
    Hostile("samples: 900 levels", judged('{"user": "a", "meta": ' + "[" * 900 + "]" * 900 + "}\n"), "1 done", 0),
    Hostile("samples: 100,000 levels", judged('{"user": ' + "[" * 100_000 + "\n"), "read/invalid_json", 3),
    Hostile("samples: NaN and infinity", judged('{"user": NaN}\n{"user": -Infinity}\n'), "read/invalid_json", 3),
    Hostile("samples: a number of 5,000 digits", judged('{"user": ' + "9" * 5000 + "}\n"), "read/invalid_json", 3),
    Hostile("samples: GBK", judged('{"user": "批次"}\n'.encode("gbk")), "read/not_text", 3),
    Hostile("samples: UTF-16", judged('{"user": "a"}\n'.encode("utf-16")), "d.jsonl is UTF-16"),
    Hostile("samples: a bare return in CSV", judged("user\na\rb\n", "d.csv"), "1 failed", 3),
    Hostile("samples: an escape in an id", judged('{"id": "\\u001b[2J", "user": [1]}\n'), "read/wrong_type", 3),
    Hostile("samples: empty", judged(""), "d.jsonl holds no samples"),
    Hostile("benchmark: not JSON", benchmark("{"), "b.json is not valid JSON"),
    Hostile("benchmark: deep", benchmark("[" * 100_000), "b.json is not valid JSON"),
    Hostile("benchmark: a number", benchmark("7"), "b.json is not a benchmark"),
    Hostile("benchmark: records of nothing", benchmark([1, None, {}]), "record 1: it is a NoneType", 1),
    Hostile("benchmark: not base64", benchmark(record(src_img_b64="%%%")), "is not base64", 1),
    Hostile("benchmark: a bomb in base64", benchmark(pixels(png(50_000, 50_000, rows=1))), "record 0", 1),
    Hostile("benchmark: PostScript in base64", benchmark(pixels(POSTSCRIPT)), "record 0: the image", 1),
    Hostile("benchmark: HTML in a category", benchmark(record(subset="<script>alert(1)</script>")), "has no prompt", 1),
    Hostile("benchmark: an escape in a category", benchmark(record(subset="\x1b[2J")), "has no prompt", 1),
    Hostile("template: attributes", benchmark(record(), "{edit_instruction.__class__.__mro__}"), "unknown variable", 1),
    Hostile("template: an index", benchmark(record(), "{0.__class__}"), "unknown variable", 1),
    Hostile("template: an open brace", benchmark(record(), '{"score": {edit_instruction'), "the template of", 1),
    Hostile(
        "template: a width of a billion", benchmark(record(), "{edit_instruction:>1000000000}"), "the template of", 1
    ),
    Hostile("template: a conversion", benchmark(record(), "{edit_instruction!z}"), "the template of", 1),
    Hostile("corpus: not JSON", linted('["a", '), "texts.json:1 is not valid JSON"),
    Hostile("corpus: deep", linted("[" * 100_000), "texts.json"),
    Hostile("corpus: a number of 5,000 digits", linted("[" + "9" * 5000 + "]"), "texts.json"),
    Hostile("corpus: GBK", linted('["批次"]'.encode("gbk")), "it reads as GBK"),
    Hostile("corpus: half a character", linted('["你\\ud83d好"]'), "texts.json, entry 1"),
    Hostile("corpus: objects", linted('[{"a": 1}]'), "texts.json, entry 1 holds no text"),
    Hostile("vocabulary: deep", vocabulary("[" * 100_000), "vocab.json is no whole vocabulary"),
    Hostile("vocabulary: a list", vocabulary([1]), "vocab.json is no whole vocabulary"),
    Hostile("vocabulary: other words", vocabulary({"words": 7, "segmenter": {}}), "vocab.json is no whole vocabulary"),
    Hostile(
        "vocabulary: words that are lists", vocabulary({"words": [[1]], "segmenter": None}), "is no whole vocabulary"
    ),
    Hostile("events: no columns", stays("a,b\n1,2\n"), "events.csv has no column"),
    Hostile("events: 1e999", stays(HEADER + "p,1e999,a,1\n"), "bad_time", 1),
    Hostile("events: NaN", stays(HEADER + "p,1,a,NaN\n"), "not_finite", 1),
    Hostile("events: a set of 1e300", stays("patient,minute,variable,value,set_index\np,1,a,1,1e300\n"), "events.csv"),
    Hostile("events: an escape in a name", stays(HEADER + "p,0,\x1b[2J,1\np,nan,\x1b[2J,1\n"), "bad_time", 1),
    Hostile("events: a pickle", stays(pickled(), "events.parquet"), "events.parquet cannot be read as Parquet"),
    Hostile("questions: no fields", questions("{}\n"), "q.jsonl:1"),
    Hostile("questions: a list", questions("[1]\n"), "q.jsonl:1"),
    Hostile(
        "questions: an image that is a number", questions('{"image": 7, "question": "a", "answer": "b"}\n'), "q.jsonl:1"
    ),
    Hostile(
        "questions: an image with NUL",
        questions('{"image": "a\\u0000", "question": "a", "answer": "b", "split": "train"}\n'),
        "q.jsonl:1",
    ),
]
