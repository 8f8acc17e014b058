"""Hostile data: JSON, CSV, Parquet, NumPy and text files, and what a line of them can hold."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from tests.hostile.making import Hostile, pickled, put
from truebatch.io.data_files import read_samples

GOOD = '{"id": "a", "input_ids": [1, 2, 3]}\n'


def planned(name: str, content: bytes | str, *more: str) -> Callable[[Path], Sequence[str]]:
    def make(folder: Path) -> Sequence[str]:
        put(folder, name, content)
        return ["plan", name, "--no-cache", *more]

    return make


def sparse(name: str, num_bytes: int, *, head: bytes = b"") -> Callable[[Path], Sequence[str]]:
    """A file of zeros that takes no room on the disk."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, name, head)
        os.truncate(folder / name, num_bytes)
        return ["plan", name, "--no-cache"]

    return make


def reading(make: Callable[[Path], Sequence[str]]) -> Callable[[Path], Callable[[], object]]:
    """The same file, and its reader alone: a command would first compare it with what it has measured before."""

    def other(folder: Path) -> Callable[[], object]:
        name = make(folder)[1]
        return lambda: list(read_samples(folder / name))

    return other


def _parquet(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def _npy(header: str) -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _npz_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("../../lengths.npy", b"\0" * 2_000_000)
    return file.getvalue()


def _object_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


TEXTS = _parquet(pyarrow.table({"text": ["a", "b"]}))
LISTS = '{"input_ids":' + "[" * 900 + "]" * 900 + "}"
OBJECTS = '{"x": 1, "y":' + '{"a":' * 900 + "1" + "}" * 901
HUGE = "{'descr':'<i8','fortran_order':False,'shape':(9999999999999,)}"
DATA = [
    Hostile("jsonl: 100,000 open brackets", planned("a.jsonl", GOOD + "[" * 100_000), "a.jsonl:2"),
    Hostile(
        "jsonl: 900 levels in a sample", planned("a.jsonl", GOOD + LISTS), "a.jsonl:2: input_ids is a list of lists"
    ),
    Hostile("jsonl: 900 levels measured", planned("a.jsonl", OBJECTS), "a.jsonl:1"),
    Hostile("jsonl: a number of 5,000 digits", planned("a.jsonl", '{"length": ' + "9" * 5000 + "}"), "a.jsonl:1"),
    Hostile("jsonl: a length of 400 digits", planned("a.jsonl", '{"length": ' + "9" * 400 + "}"), "a.jsonl:1"),
    Hostile("jsonl: a length 1e999", planned("a.jsonl", '{"length": 1e999}'), "a.jsonl:1"),
    Hostile("jsonl: a length NaN", planned("a.jsonl", '{"length": NaN}'), "a.jsonl:1"),
    Hostile("jsonl: a negative length", planned("a.jsonl", '{"length": -1}'), "a.jsonl:1 has no usable length"),
    Hostile("jsonl: digits that are none", planned("a.jsonl", '{"length": "12"}\n{"length": "1²"}\n'), "a.jsonl:2"),
    Hostile("jsonl: 5,000 digits in a text", planned("a.jsonl", '{"length": "' + "9" * 5000 + '"}\n'), "a.jsonl:1"),
    Hostile("jsonl: signs before digits", planned("a.jsonl", '{"length": "12"}\n{"length": "--5"}\n'), "a.jsonl:2"),
    Hostile(
        "jsonl: half a character", planned("a.jsonl", '{"text": "a\\ud83d b"}\n'), "a.jsonl:1 holds half a character"
    ),
    Hostile("jsonl: a NUL byte", planned("a.jsonl", GOOD.encode() + b'{"text": "\0"}\n'), "a.jsonl:2 holds a NUL byte"),
    Hostile(
        "jsonl: GBK after good lines",
        planned("a.jsonl", (GOOD + '{"text": "批次"}\n').encode("gbk")),
        "a.jsonl:2 is not",
    ),
    Hostile(
        "jsonl: carriage returns only", planned("a.jsonl", GOOD.replace("\n", "\r") * 2), "a.jsonl:1 is not valid JSON"
    ),
    Hostile(
        "jsonl: cut in the middle", planned("a.jsonl", GOOD + '{"input_ids": [1, 2'), "a.jsonl:2 is not valid JSON; it"
    ),
    Hostile("jsonl: an array of lines", planned("a.jsonl", '[{"text": "a"},\n{"text": "b"}]'), "name it a.json"),
    Hostile("jsonl: an escape of the terminal", planned("a.jsonl", '{"\\u001b[2Jx": 1, "y": 2}'), "a.jsonl:1"),
    Hostile("jsonl: a line of 200 MB", reading(sparse("a.jsonl", 200 * 2**20, head=b'{"text": "')), "a.jsonl:1"),
    Hostile("json: deep and valid", planned("a.json", "[" * 100_000 + "]" * 100_000), "a.json holds JSON that cannot"),
    Hostile("json: several values", planned("a.json", GOOD + GOOD), "name it a.jsonl"),
    Hostile("json: a file of 5 GB", reading(sparse("a.json", 5 * 2**30, head=b"[")), "a.json is too large"),
    Hostile("csv: an open quote", planned("a.csv", 'id,text\n1,"never closed\n2,x\n'), "is not valid CSV"),
    Hostile("csv: too many cells", planned("a.csv", "id,text\n1,a,b,c\n"), "a.csv:2 has 4 cells"),
    Hostile("csv: a bare carriage return", planned("a.csv", "id,text\n1,a\rb\n"), "a.csv"),
    Hostile("csv: only a header", planned("a.csv", "id,text\n"), "a.csv holds no samples"),
    Hostile("parquet: not one", planned("a.parquet", b"PAR1" + b"\0" * 100), "cannot be read as Parquet"),
    Hostile("parquet: cut off", planned("a.parquet", TEXTS[: len(TEXTS) // 2]), "a.parquet cannot be read as Parquet"),
    Hostile("parquet: a lying footer", planned("a.parquet", TEXTS[:-8] + b"\xff\xff\xff\x7fPAR1"), "cannot be read"),
    Hostile("parquet: a pickle", planned("a.parquet", pickled()), "a.parquet cannot be read as Parquet"),
    Hostile("parquet: a damaged page", planned("a.parquet", TEXTS[:6] + b"\xff" * 16 + TEXTS[22:]), "a.parquet"),
    Hostile("npy: an array of pickles", planned("a.npy", _object_array()), "a.npy is not a .npy file of numbers"),
    Hostile("npy: a plain pickle", planned("a.npy", pickled()), "a.npy is not a .npy file of numbers"),
    Hostile(
        "npy: a lying shape",
        planned("a.npy", _npy("{'descr':'<i8','fortran_order':False,'shape':(10**15,),}")),
        "a.npy",
    ),
    Hostile("npy: 10^13 numbers", planned("a.npy", _npy(HUGE)), "a.npy"),
    Hostile("npy: code for a header", planned("a.npy", _npy("__import__('os').mkdir('CODE_WAS_RUN')\n")), "a.npy"),
    Hostile("npy: a header of brackets", planned("a.npy", _npy("(" * 2000 + "\n")), "a.npy is not a .npy file"),
    Hostile("npy: a zip in its place", planned("a.npy", _npz_bomb()), "a.npy"),
    Hostile("tokenizer: not one", planned("a.jsonl", '{"text": "a"}', "--tokenizer", "a.jsonl"), "is not a tokenizer"),
    Hostile("a kind nobody reads", planned("a.pkl", pickled()), "a.pkl is in a format that is not supported"),
    Hostile("a name with a NUL", lambda folder: ["plan", "a\0b.jsonl"], "a\\u0000b.jsonl"),
    Hostile("a name of 5,000 letters", lambda folder: ["plan", "a" * 5000 + ".jsonl"], "aaa"),
    Hostile("a name with an escape", lambda folder: ["plan", "\x1b[31mx.jsonl"], "\\u001b[31mx.jsonl"),
]
