"""Bounds: what files claim to be large takes little memory, and names out of files never lead outside a folder."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.making import png, put, safetensors
from tests.hostile.settings_files import LAUGHS
from truebatch.errors import TruebatchError
from truebatch.io.text_encoding import read_text
from truebatch.reports.artifacts import keep_picture
from truebatch_systems.vl_reward.data.dataset import EditPair
from truebatch_systems.vl_reward.stages import picture_name

ROOT = Path(__file__).parents[2]
MEBIBYTE = 2**20
CHILD = """
import json, resource, sys
import psutil, pyarrow.parquet, PIL.Image, numpy, yaml, truebatch.planning.lengths.measure, truebatch.reports.plan_tables
from truebatch.cli.app import run
limit = psutil.Process().memory_info().vms + 512 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(json.dumps([run(line) for line in json.loads(sys.argv[1])]))
"""


def test_what_claims_to_be_large_is_refused_inside_half_a_gibibyte(tmp_path):
    import pyarrow
    from pyarrow import parquet

    put(tmp_path, "laughs.yaml", LAUGHS)
    cell = pyarrow.array(["x" * (66 * MEBIBYTE)], type=pyarrow.large_string())
    parquet.write_table(
        pyarrow.table({"text": cell}), tmp_path / "cell.parquet", compression="zstd", use_dictionary=False
    )
    del cell
    put(tmp_path, "line.jsonl", b'{"text": "')
    os.truncate(tmp_path / "line.jsonl", 65 * MEBIBYTE)
    os.truncate(put(tmp_path, "array.json", b"["), 6 << 30)
    huge = b"\x93NUMPY\x01\x00\x3f\x00{'descr':'<i8','fortran_order':False,'shape':(99999999999,)}   "
    put(tmp_path, "huge.npy", huge)
    lines = [
        ["config", "check", "plan", "--config", "laughs.yaml"],
        *(["plan", name, "--no-cache"] for name in ("cell.parquet", "line.jsonl", "huge.npy")),
        ["config", "check", "plan", "--config", "array.json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRUEBATCH_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [2] * len(lines), done.stderr
    assert "Traceback" not in done.stderr
    assert not [
        name
        for name in ("laughs.yaml", "cell.parquet", "line.jsonl", "huge.npy", "array.json")
        if name not in done.stderr
    ], done.stderr


def test_a_small_file_takes_little_memory_however_large_it_might_be(tmp_path):
    text = put(tmp_path, "small.json", b'{"a": 1}')
    assert read_text(text, max_bytes=2**62) == '{"a": 1}'
    assert read_text(Path("/proc/self/stat"), max_bytes=2**20).startswith(f"{os.getpid()} ")  # says that it is empty
    with pytest.raises(TruebatchError, match="too large"):
        read_text(text, max_bytes=7)


def test_pictures_and_tensors_that_claim_to_be_large_are_refused_before_memory_is_taken(tmp_path):
    from truebatch.planning.lengths.image_size import measure_images
    from truebatch.training.checkpoint.tensor_files import read_tensors

    picture = put(tmp_path, "a.png", png(50_000, 50_000, rows=1))
    tensors = put(tmp_path, "a.safetensors", safetensors({}, num=2**40))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for call in (lambda: measure_images([picture]), lambda: read_tensors(tensors)):
        with pytest.raises(TruebatchError):
            call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


TRAVERSALS = [
    "..", ".", "../x", "../../x", "../../../../etc/passwd", "/etc/passwd", "/", "//", "//host/share", "a/../../x",
    "a/b", "./x", "~", "~/x", "~root/x", "C:\\x", "C:x", "\\\\host\\share", "..\\x", "..\\..\\x", "a\\..\\..\\x",
    "%2e%2e%2fx", "..%2fx", "....//x", "..;/x", "x\0.png", "\0", "x\n../y", "x\r\n", " ", "  ", "", "-rf", "--help",
    "$(id)", "`id`", "x;id", "|id", "CON", "NUL", "aux.png", "X" * 300, "\u202e\u2066gnp", "．．／x", "。。/x", "\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("name", TRAVERSALS, ids=lambda name: ascii(name)[:24])
def test_a_name_out_of_a_file_stays_inside_the_folder(name, tmp_path):
    for id_, category in ((name, "physical"), ("a", name), (name, name)):
        kept = picture_name(EditPair(id=id_, category=category, instruction="x", image=""))
        path = tmp_path / kept
        assert path.resolve().is_relative_to(tmp_path)
        assert path.resolve() != tmp_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    with pytest.raises(TruebatchError):
        keep_picture(tmp_path, name, "<svg/>")
