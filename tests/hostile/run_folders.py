"""Hostile run folders: checkpoints, manifests, journals, logs and plans that lie about what they hold."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.hostile.making import CANARY, Hostile, entry, pickled, put, safetensors, torch_zip
from truebatch import PlanConfig, build_plan, load_plan, save_plan
from truebatch.io.atomic_files import hash_file
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.scorer import Scorer
from truebatch.scoring.spec import ScoreCall, save_call
from truebatch.training.checkpoint.store import Checkpoint, load_newest, save_checkpoint
from truebatch.training.checkpoint.tensor_files import read_tensors

BACKUP = "go back to an earlier"


@cache
def _scored() -> Path:
    """A small scoring run, to be spoilt in copies."""
    folder = Path(tempfile.mkdtemp())
    put(folder, "d.jsonl", '{"user": "a"}\n{"user": "bb", "options": {"fail": "raise"}}\n')
    backend = ScriptedBackend()
    Scorer([backend], limits=Limits()).score(folder / "d.jsonl", folder / "run", check=False)
    save_call(folder / "run", ScoreCall(data="d.jsonl", model="scripted"))
    return folder


def scored(spoil: Callable[[Path], object], *command: str) -> Callable[[Path], Sequence[str]]:
    """A scoring run with something wrong in it, and a command that reads it."""

    def make(folder: Path) -> Sequence[str]:
        shutil.copytree(_scored(), folder, dirs_exist_ok=True)
        spoil(folder / "run")
        return command or ["run", "status", "run"]

    return make


def changed(name: str, content: Any) -> Callable[[Path], object]:
    return lambda run: put(run, name, content)


def _edited(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda run: put(run, name, json.loads((run / name).read_text()) | values)


def _journal(run: Path) -> Path:
    return next((run / "journal").glob("worker-*.db"))


def _rewritten(*statements: str) -> Callable[[Path], object]:
    def spoil(run: Path) -> None:
        connection = sqlite3.connect(_journal(run))
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return spoil


def _torn(run: Path) -> None:
    path = _journal(run)
    data = bytearray(path.read_bytes())
    data[100 : len(data) : 7] = b"\xff" * len(data[100 : len(data) : 7])
    for other in (run / "journal").glob("*-wal"):
        other.unlink()
    path.write_bytes(data)


def _piped(run: Path) -> None:
    _journal(run).unlink()
    os.mkfifo(run / "journal" / "worker-9.db")


@cache
def _trained() -> Path:
    """A run folder as `train` leaves it, made without training."""
    folder = Path(tempfile.mkdtemp()) / "run"
    save_checkpoint(folder / "checkpoints", Checkpoint(step=1, parts={"model": {"w": torch.ones(2)}}))
    put(folder, "config.yaml", "train: {}\n")
    put(folder, "run.json", {"system": "chinese_gpt"})
    put(folder, "status.json", {"state": "done", "step": 1, "exit_code": 0, "message": ""})
    put(folder, "metrics.jsonl", '{"step": 1, "loss": 1.0}\n')
    return folder


def trained(spoil: Callable[[Path], object], *command: str) -> Callable[[Path], Sequence[str]]:
    """A training run with something wrong in it, and a command that reads it."""

    def make(folder: Path) -> Sequence[str]:
        shutil.copytree(_trained(), folder / "run")
        spoil(folder / "run")
        return command or ["report", "run"]

    return make


def resumed(spoil: Callable[[Path], object]) -> Callable[[Path], Callable[[], object]]:
    """Its only checkpoint spoilt, and what a resumed run calls."""

    def make(folder: Path) -> Callable[[], object]:
        shutil.copytree(_trained(), folder / "run")
        spoil(folder / "run" / "checkpoints" / "step-1")
        return lambda: load_newest(folder / "run" / "checkpoints")

    return make


def _signed(folder: Path, **values: Any) -> None:
    """A manifest that lies and has the hash of its own lies."""
    from truebatch.training.checkpoint.manifest import _check_of

    manifest = json.loads((folder / "manifest.json").read_text()) | values
    manifest.pop("check")
    put(folder, "manifest.json", manifest | {"check": _check_of(manifest)})


def sharded(more: bytes = b"", elsewhere: str = "", **about: Any) -> Callable[[Path], object]:
    """A checkpoint whose manifest is right and whose `shards.json` says this of a tensor `w` of four zeros."""
    one = {"dtype": "F32", "shape": [4], "rows": [4], **about}

    def spoil(step: Path) -> None:
        put(step, "model-1-of-1.safetensors", more or safetensors({"w": entry([4], 0, 16)}, b"\0" * 16))
        put(step, "shards.json", {"model": {"w": one}})
        files = json.loads((step / "manifest.json").read_text())["files"]
        for name in ("shards.json", "model-1-of-1.safetensors"):
            files[name] = asdict(hash_file(step / name))
        _signed(step, version=3, files=files | ({elsewhere: files["shards.json"]} if elsewhere else {}))

    return spoil


def _sharded_link(step: Path) -> None:
    sharded()(step)
    target = put(step.parent.parent, "elsewhere", (step / "model-1-of-1.safetensors").read_bytes())
    (step / "model-1-of-1.safetensors").unlink()
    (step / "model-1-of-1.safetensors").symlink_to(target)


def _linked(step: Path) -> None:
    target = put(step.parent.parent, "elsewhere.safetensors", (step / "model.safetensors").read_bytes())
    (step / "model.safetensors").unlink()
    (step / "model.safetensors").symlink_to(target)


def _outside(run: Path) -> None:
    put(run, "evil.py", f"import os\nos.mkdir({CANARY!r})\nsystem = 1\n")
    put(run, "run.json", {"system": f"{run / 'evil.py'}:system"})


def tensors(content: bytes) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        path = put(folder, "a.safetensors", content)
        return lambda: read_tensors(path)

    return make


def plans(spoil: Callable[[bytes], bytes]) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        path = folder / "a.plan"
        save_plan(build_plan([3, 1, 4, 1, 5], PlanConfig(cells=8)), path)
        path.write_bytes(spoil(path.read_bytes()))
        return lambda: load_plan(path)

    return make


def _relaid(data: bytes, **entries: Any) -> bytes:
    num = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + num])
    return safetensors(header | entries, data[8 + num :])


RUNS = [
    Hostile("manifest: not JSON", scored(changed("manifest.json", "{")), "manifest.json is not JSON"),
    Hostile("manifest: a list", scored(changed("manifest.json", [])), "is not a manifest"),
    Hostile(
        "manifest: fields missing",
        scored(changed("manifest.json", {"format": "truebatch-journal", "version": 1})),
        "manifest",
    ),
    Hostile(
        "manifest: of a checkpoint", scored(changed("manifest.json", {"format": "truebatch checkpoint"})), "is not a"
    ),
    Hostile(
        "manifest: changed by hand", scored(_edited("manifest.json", config={"model": "other"})), "was changed by hand"
    ),
    Hostile("list: not JSON", scored(changed("input.jsonl", "{\n")), "input.jsonl:1"),
    Hostile("list: other fields", scored(changed("input.jsonl", '{"index": 0, "evil": 1}\n')), "input.jsonl:1"),
    Hostile("list: not UTF-8", scored(changed("input.jsonl", b"\xff\xfe{}\n")), "input.jsonl"),
    Hostile(
        "call: other fields",
        scored(changed("call.json", {"x": 1}), "run", "retry", "run", "--kind", "raised"),
        "call.json",
    ),
    Hostile("call: a list", scored(changed("call.json", [1]), "run", "retry", "run", "--kind", "raised"), "call.json"),
    Hostile("batches: not a plan", scored(changed("plan.json", "[1, 2"), "run", "status", "run"), "plan.json"),
    Hostile(
        "batches: another shape", scored(changed("plan.json", {"batches": 7}), "run", "status", "run"), "plan.json"
    ),
    Hostile("journal: not SQLite", scored(lambda run: _journal(run).write_bytes(pickled())), "cannot be read"),
    Hostile("journal: damaged pages", scored(_torn), "worker-0"),
    Hostile("journal: a pipe", scored(_piped), "worker-9.db"),
    Hostile("journal: another table", scored(_rewritten("DROP TABLE results", "CREATE TABLE results (x)")), "worker-0"),
    Hostile("journal: a text for a score", scored(_rewritten("UPDATE results SET score = 'high'")), "worker-0", 1),
    Hostile("journal: output that is no JSON", scored(_rewritten("UPDATE results SET output = '{'")), "worker-0", 1),
    Hostile("journal: an unknown status", scored(_rewritten("UPDATE results SET status = 'great'")), "worker-0", 1),
    Hostile(
        "journal: a failure with a score",
        scored(_rewritten("UPDATE results SET status = 'failed', score = 9")),
        "worker-0",
        1,
    ),
    Hostile(
        "export: outside, no such folder",
        scored(str, "run", "export", "run", "--to", "../../no/x.csv"),
        "cannot be written",
    ),
    Hostile("status: a list", trained(changed("status.json", [1])), "status.json"),
    Hostile("status: deep", trained(changed("status.json", "[" * 100_000)), "status.json is not JSON"),
    Hostile(
        "settings of a run: a tag",
        trained(changed("config.yaml", "a: !!python/none 1\n")),
        "config.yaml:1 YAML tags are not",
    ),
    Hostile(
        "log: not JSON",
        trained(changed("metrics.jsonl", '{"step": 1}\n{"step"\n')),
        "metrics.jsonl is damaged in line 2",
    ),
    Hostile("log: bytes", trained(changed("metrics.jsonl", b"\xff\xfe\n")), "metrics.jsonl is damaged in line 1"),
    Hostile("fit: other fields", trained(changed("fit.json", {"points": [{}]})), "fit.json"),
    Hostile("fit: a text", trained(changed("fit.json", "points")), "fit.json"),
    Hostile("figures: a list", trained(changed("evaluation/figures.json", [1])), "figures.json"),
    Hostile("finding: no table", trained(changed("findings/a.json", {"header": 1})), "a.json does not hold a table"),
    Hostile("system of a run: missing", trained(changed("run.json", {}), "evaluate", "run"), "run.json"),
    Hostile("system of a run: a list", trained(changed("run.json", [1]), "evaluate", "run"), "run.json"),
    Hostile("system of a run: code inside the run", trained(_outside, "evaluate", "run"), "does not come with"),
    Hostile(
        "best: a path",
        trained(changed("checkpoints/best.json", {"step": "../../x"}), "evaluate", "run"),
        "hold no vocabulary",
    ),
    Hostile(
        "checkpoint: no manifest", resumed(lambda step: (step / "manifest.json").unlink()), "no checkpoint of this run"
    ),
    Hostile("checkpoint: deep manifest", resumed(changed("manifest.json", "[" * 100_000)), "manifest.json"),
    Hostile(
        "checkpoint: manifest of others",
        resumed(changed("manifest.json", {"format": "dcp"})),
        "is not one of truebatch",
    ),
    Hostile(
        "checkpoint: manifest changed", resumed(_edited("manifest.json", step=2)), "does not agree with its own hash"
    ),
    Hostile("checkpoint: another step", resumed(lambda step: _signed(step, step=2)), "its manifest is that of step 2"),
    Hostile(
        "checkpoint: files elsewhere",
        resumed(lambda step: _signed(step, files={"../../x": {"num_bytes": 1, "sha256": ""}})),
        "../../x is missing",
    ),
    Hostile(
        "checkpoint: files as a list",
        resumed(lambda step: _signed(step, files=["a"])),
        "manifest.json has other fields",
    ),
    Hostile(
        "checkpoint: a field of another kind",
        resumed(lambda step: _signed(step, nonfinite=3)),
        "manifest.json has other fields",
    ),
    Hostile("checkpoint: a file too many", resumed(changed("extra.pkl", pickled())), "extra.pkl does not belong to it"),
    Hostile("checkpoint: a link", resumed(_linked), "model.safetensors is not a regular file"),
    Hostile(
        "checkpoint: a pickle for tensors", resumed(changed("model.safetensors", torch_zip())), "model.safetensors"
    ),
    Hostile("checkpoint: values changed", resumed(changed("values.json", "{}")), "values.json"),
    Hostile("shards: of a path", resumed(sharded(elsewhere="/etc/passwd")), "/etc/passwd is missing"),
    Hostile("shards: of a folder above", resumed(sharded(elsewhere="../../../passwd")), "../passwd is missing"),
    Hostile("shards: a link", resumed(_sharded_link), "model-1-of-1.safetensors is not a regular file"),
    Hostile("shards: a pickle", resumed(sharded(pickled())), "model-1-of-1.safetensors"),
    Hostile("shards: 10^15 rows", resumed(sharded(shape=[10**15], rows=[10**15])), "another shape or dtype"),
    Hostile("shards: more cells than a number", resumed(sharded(shape=[0, 2**62, 2**62], rows=[0])), "no tensor has"),
    Hostile("shards: cells below zero", resumed(sharded(shape=[0, -4], rows=[0])), "no tensor has"),
    Hostile("shards: rows below zero", resumed(sharded(shape=[-4], rows=[-4])), "no tensor has"),
    Hostile("shards: no shape", resumed(sharded(shape=[])), "shards.json"),
    Hostile("shards: no files", resumed(sharded(shape=[0], rows=[])), "shards.json"),
    Hostile("shards: a million files", resumed(sharded(rows=[0] * 10**6)), "names files that do not belong"),
    Hostile("shards: another dtype", resumed(sharded(dtype="I64")), "another shape or dtype"),
    Hostile("shards: an unknown dtype", resumed(sharded(dtype="OBJ")), "shards.json"),
    Hostile("shards: a list for a dtype", resumed(sharded(dtype=["F32"])), "shards.json"),
    Hostile("shards: a text for a shape", resumed(sharded(shape="44", rows="44")), "shards.json"),
    Hostile("tensors: a pickle", tensors(pickled()), "a.safetensors is not a whole safetensors file"),
    Hostile("tensors: torch.save", tensors(torch_zip()), "a.safetensors is not a whole safetensors file"),
    Hostile(
        "tensors: a header of 2^63 bytes", tensors(safetensors({}, num=2**63 - 1)), "is not a whole safetensors file"
    ),
    Hostile(
        "tensors: offsets out of range",
        tensors(safetensors({"w": entry([4], 0, 10**12)}, b"\0" * 16)),
        "is not a whole",
    ),
    Hostile(
        "tensors: overlapping",
        tensors(safetensors({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, b"\0" * 24)),
        "is not a whole",
    ),
    Hostile(
        "tensors: a shape that lies", tensors(safetensors({"w": entry([10**9], 0, 16)}, b"\0" * 16)), "is not a whole"
    ),
    Hostile("tensors: negative offsets", tensors(safetensors({"w": entry([4], -16, 0)}, b"\0" * 16)), "is not a whole"),
    Hostile(
        "tensors: an unknown dtype", tensors(safetensors({"w": entry([4], 0, 16, "OBJ")}, b"\0" * 16)), "is not a whole"
    ),
    Hostile("tensors: a deep header", tensors(safetensors(b"[" * 100_000)), "is not a whole safetensors file"),
    Hostile("tensors: empty", tensors(b""), "is not a whole safetensors file"),
    Hostile("plan: cut off", plans(lambda data: data[:-9]), "damaged or truncated"),
    Hostile(
        "plan: a header of 2^63 bytes", plans(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]), "damaged or truncated"
    ),
    Hostile(
        "plan: a lying size",
        plans(lambda data: _relaid(data, order=entry([10**12], 0, 10**13, "I64"))),
        "damaged or truncated",
    ),
    Hostile(
        "plan: a text for a size",
        plans(lambda data: _relaid(data, order=entry(["5"], 0, 20, "I32"))),
        "damaged or truncated",
    ),
    Hostile(
        "plan: one array too many",
        plans(lambda data: _relaid(data, evil=entry([1], 0, 8, "I64"))),
        "damaged or truncated",
    ),
    Hostile("plan: a changed number", plans(lambda data: data[:-1] + b"\x07"), "does not match its checksum"),
    Hostile(
        "plan: a model's file",
        plans(lambda data: safetensors({"w": entry([4], 0, 16)}, b"\0" * 16)),
        "this file is not a plan",
    ),
    Hostile("plan: a pickle", plans(lambda data: pickled()), "damaged or truncated"),
    Hostile("plan: a deep header", plans(lambda data: safetensors(b"[" * 100_000)), "damaged or truncated"),
]
