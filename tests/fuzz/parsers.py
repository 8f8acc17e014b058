"""The parsers that are fuzzed: a function of bytes, which gives a value or raises a `TruebatchError`, and nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from truebatch import load_plan
from truebatch.config.load import apply_override, check_config
from truebatch.config.yaml_files import Document, parse_value, parse_yaml
from truebatch.generation.config import Generation
from truebatch.import_target import is_target, resolve_target
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import read_lines
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.length_field import choose_reading, read_length
from truebatch.scoring.inputs.read_samples import read_requests
from truebatch.scoring.readouts import Generate
from truebatch.scoring.readouts.read_answer import read_answer
from truebatch.scoring.readouts.scale import ANY_NUMBER, Scale
from truebatch.scoring.store.input_index import load_list
from truebatch.training.checkpoint.manifest import read_manifest
from truebatch.training.checkpoint.tensor_files import read_tensors
from truebatch_systems.seqset_vae.config import ColumnConfig
from truebatch_systems.seqset_vae.data.event_tables import read_long_table
from truebatch_systems.vl_reward.data.dataset import EditPair, Wanted, read_benchmark
from truebatch_systems.vl_reward.data.prompts import CategoryPrompt, fill_prompt, prompt_faults
from truebatch_systems.vlm_pruning.eval.answers import chosen_option, vqa_words, yes_or_no

CORPUS = Path(__file__).parent / "corpus"
_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def _file(name: str, data: bytes) -> Path:
    path = _FOLDER / name
    path.write_bytes(data)
    return path


def _text(data: bytes) -> str:
    """Text of any kind, lone surrogates too: programs hand those over as well."""
    return data.decode("utf-8", "surrogateescape")


def fuzz_yaml(data: bytes) -> None:
    check_config(PlanConfig, parse_yaml(data.decode("utf-8", "replace"), name="run.yaml"))


def fuzz_lines(data: bytes) -> None:
    list(read_lines(_file("a.txt", data)))


def fuzz_jsonl(data: bytes) -> None:
    for place, sample in read_samples(_file("a.jsonl", data)):
        read_length(choose_reading(sample, place, None), sample, place)


def fuzz_asked(data: bytes) -> None:
    for name in ("a.jsonl", "a.csv"):
        for _ in read_requests(_file(name, data)):
            pass


def fuzz_table(data: bytes) -> None:
    read_long_table(_file("a.csv", data), ColumnConfig())


def fuzz_reward_answer(data: bytes) -> None:
    for kind in ("number", "yes_no", "pair"):
        read_answer(_text(data), Scale(kind=kind))  # type: ignore[arg-type]


def fuzz_judges(data: bytes) -> None:
    text = _text(data)
    yes_or_no(text)
    vqa_words(text)
    chosen_option(text, ["red", "a blue box", ""], is_numbered=True)
    Generate(Generation(temperature=0.0), scale=ANY_NUMBER).answer(text, "end", 1)


def fuzz_plan(data: bytes) -> None:
    load_plan(_file("a.plan", data))


def fuzz_manifest(data: bytes) -> None:
    _file("manifest.json", data)
    read_manifest(_FOLDER)


def fuzz_tensors(data: bytes) -> None:
    read_tensors(_file("a.safetensors", data))


def fuzz_list(data: bytes) -> None:
    _file("input.jsonl", data)
    load_list(_FOLDER)


def fuzz_target(data: bytes) -> None:
    text = _text(data)
    if is_target(text) and not _is_other_module(text.rpartition(":")[0].partition(".")[0]):
        resolve_target(text)


def _is_other_module(name: str) -> bool:
    """A module that is there beside `json`: a fuzzer has no business importing it."""
    return name.isidentifier() and name != "json" and find_spec(name) is not None


def fuzz_override(data: bytes) -> None:
    document = Document({"cells": 8, "costs": {"a": 1}})
    parse_value(_text(data))
    apply_override(document, _text(data))
    check_config(PlanConfig, document)


def fuzz_template(data: bytes) -> None:
    prompt = CategoryPrompt(system_prompt="", user_prompt_template=_text(data))
    if not list(prompt_faults({"a": prompt}, ["a"])):
        fill_prompt(prompt, EditPair(id="1", category="a", instruction="x", image=""))


def fuzz_benchmark(data: bytes) -> None:
    read_benchmark(_file("b.json", data), Wanted())


@dataclass(frozen=True)
class Fuzzed:
    """A parser and the beginnings of its inputs."""

    name: str
    call: Callable[[bytes], None]
    words: tuple[bytes, ...]
    """Pieces that mutations put in."""


JSON = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"NaN", b"1e999", b"-1", b"\\ud800", b"9" * 400, b"true")
YAML = (
    b": ",
    b"- ",
    b"&a ",
    b"*a",
    b"!!",
    b"<<: ",
    b"\n",
    b"  ",
    b"\t",
    b"|",
    b">",
    b"%",
    b"---\n",
    b'"\\U0011',
    b"1__0",
)
FUZZED = (
    Fuzzed("yaml", fuzz_yaml, YAML),
    Fuzzed("lines", fuzz_lines, (b"\r", b"\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc4\xe3")),
    Fuzzed("jsonl", fuzz_jsonl, JSON),
    Fuzzed("asked", fuzz_asked, (*JSON, b"\r", b'""', b'"messages"', b'"image"')),
    Fuzzed("table", fuzz_table, (b",", b"\n", b'"', b"1e999", b"nan", b"\r", b"patient", b"-", b"\x00")),
    Fuzzed("reward_answer", fuzz_reward_answer, (*JSON, b"score", b"/10", b"yes", "评分：".encode(), b"**")),
    Fuzzed("judges", fuzz_judges, (b"yes", b"no", b"(B)", b"answer is", b"9" * 400, b"'", "²".encode(), b"1,0")),
    Fuzzed("plan", fuzz_plan, (*JSON, b"\xff\xff\xff\x7f", b"I64", b"data_offsets")),
    Fuzzed("manifest", fuzz_manifest, (*JSON, b"files", b"check")),
    Fuzzed("tensors", fuzz_tensors, (*JSON, b"\xff\xff\xff\x7f", b"F32", b"data_offsets")),
    Fuzzed("list", fuzz_list, (*JSON, b'"index"', b'"key"')),
    Fuzzed("target", fuzz_target, (b":", b".", b".py", b"json:", b"\0", b"../", "：".encode(), b"__class__")),
    Fuzzed("override", fuzz_override, (*YAML, *JSON, b"=", b".", b"costs.a=")),
    Fuzzed("template", fuzz_template, (b"{", b"}", b"!r", b":>9", b"{0}", b"edit_instruction", b"[x]", b".__class__")),
    Fuzzed("benchmark", fuzz_benchmark, (*JSON, b"subset", b"src_img_b64", b"data:,")),
)
