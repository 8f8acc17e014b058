# ruff: noqa: E501
"""Folders of strangers: code they name, templates and tokenizers without an end, files that are none, sizes that lie."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.hf.test_template_sandbox import HOSTILE as TEMPLATES
from tests.hostile.making import CANARY, Hostile, put
from tests.hostile.model_folders import SCORE, TRAIN, VERIFY, config, edited, models, template
from tests.hostile.run_folders import changed, scored, trained

CODE = f"import os\nos.mkdir({CANARY!r})\nsystem = samples = 1\n"
FOREIGN = "does not come with truebatch"
NO_NEED = "has rules no tokenizer needs"
MORE = "more than any model has"
PLAN = ("plan", "d.jsonl", "--tokenizer", "model", "--no-cache")


def named(target: str, *command: str) -> Hostile:
    """A run whose run.json names code, which lies inside of the run and beside it."""

    def spoil(run: Path) -> None:
        put(run, "evil.py", CODE)
        put(run.parent, "evil.py", CODE)
        put(run, "run.json", {"system": target})

    line = (command[0], "run", *command[1:])
    return Hostile(f"run names code: {target}, to {command[0]}", trained(spoil, *line), FOREIGN)


def _tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "tokenizer.json").read_text())
        change(values)
        put(folder, "tokenizer.json", values)

    return spoil


def _growing(kind: str, part: str, inner: str, num: int) -> Callable[[Path], object]:
    rule = {"type": "Replace", "pattern": {kind: "e"}, "content": "ee"}
    return _tokenizer(lambda values: values.update({part: {"type": "Sequence", inner: [rule] * num}}))


def _pattern(text: str) -> Callable[[Path], object]:
    rule = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
    return _tokenizer(lambda values: values.update(pre_tokenizer=rule))


def _padded(values: dict[str, Any]) -> None:
    values["padding"] = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip


def _repeated(values: dict[str, Any]) -> None:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000
    values["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}


def piped(name: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def linked(name: str, target: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def foldered(name: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def sparse(name: str, num_bytes: int, head: bytes = b"") -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        put(folder, name, head)
        os.truncate(folder / name, num_bytes)

    return spoil


def _huge_weights(folder: Path) -> None:
    """A header that is true of a file that is nearly empty on the disk: 64 TB of zeros."""
    size = 1 << 46
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    sparse("model.safetensors", min(8 + len(header) + size, 1 << 43), struct.pack("<Q", len(header)) + header)(folder)


def _adapter(folder: Path) -> None:
    put(folder, "adapter_config.json", {"base_model_name_or_path": "/etc", "peft_type": "LORA"})


def _listed(**values: Any) -> Callable[[Path], object]:
    return edited("config.json", **values)


def pictures(make: Callable[[Path], object]) -> Callable[[Path], Sequence[str]]:
    """A picture that is none, named by a sample of a file."""

    def write(folder: Path) -> Sequence[str]:
        make(folder / "a.png")
        put(folder, "d.jsonl", '{"user": "a", "images": ["a.png"]}\n')
        return ["score", "d.jsonl", "--model", "scripted", "--yesno", "--no-check"]

    return write


def _bomb(path: Path) -> None:
    raw = zlib.compress(b"\0" * 1_000_000, 9)
    chunk = struct.pack(">I", len(raw)) + b"IDAT" + raw + struct.pack(">I", zlib.crc32(b"IDAT" + raw))
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    first = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + first + chunk)


STRANGERS = [
    *(named("run.evil:system", name) for name in ("evaluate", "show", "verify")),
    named("run.evil:system", "generate", "--prompt", "x"),
    *(named(target, "evaluate") for target in ("evil:system", "evil.py:system", "run/evil.py:system", "os:abort")),
    *(named(target, "verify") for target in ("posix:abort", "os:getcwd", "sys:exit", "../evil.py:system")),
    named("", "evaluate"),
    named("chinese_gpt:\x1b[2J", "evaluate"),
    Hostile(
        "run: a link for its evaluation",
        trained(lambda run: (run / "evaluation").symlink_to("/tmp"), "evaluate", "run"),
        "vocabulary",
    ),
    Hostile("run: windows without number", scored(changed("windows.json", {"windows": 10**9, "size": 1})), "windows.json"),
    Hostile("run: windows of size 0", scored(changed("windows.json", {"windows": 1, "size": 0})), "windows.json"),
    Hostile("run: windows as a list", scored(changed("windows.json", [1])), "windows.json"),
    Hostile("run: windows of digits", scored(changed("windows.json", '{"windows": ' + "9" * 5000 + "}")), "windows.json"),
    Hostile(
        "run: windows, to export",
        scored(changed("windows.json", {"windows": 10**9, "size": 1}), "run", "export", "run", "--to", "x.csv"),
        "windows.json",
    ),
    Hostile("run: a pipe for its status", trained(piped("status.json")), "report", 0),
    Hostile("run: a pipe for its system", trained(piped("run.json"), "evaluate", "run"), "run.json"),
    Hostile("run: a device for its figures", trained(linked("evaluation.json", "/dev/zero")), "report", 0),
    Hostile("run: a log of 8 GB without a line", trained(sparse("metrics.jsonl", 8 << 30)), "metrics.jsonl"),
    Hostile("run: a status of 8 GB", trained(sparse("status.json", 8 << 30)), "status.json"),
    Hostile("run: settings of 8 GB", trained(sparse("config.yaml", 8 << 30), "evaluate", "run"), "config.yaml"),
    Hostile("run: a link around itself", trained(linked("status.json", "status.json")), "report", 0),
    Hostile("run: a folder for its system", trained(foldered("run.json"), "evaluate", "run"), "run"),
    *(
        Hostile(f"template, to train: {name}", models(template(text), TRAIN), "chat template")
        for name, text in TEMPLATES.items()
    ),
    *(
        Hostile(f"template, to score: {name}", models(template(TEMPLATES[name]), SCORE), "template", 3)
        for name in ("nested loops", "a width", "doubling", "center")
    ),
    *(
        Hostile(f"tokenizer: 28 replacements ({kind}) in its {part}, to {command[0]}", models(_growing(kind, part, inner, 28), command), NO_NEED)
        for kind, part, inner in (("String", "normalizer", "normalizers"), ("Regex", "normalizer", "normalizers"), ("String", "decoder", "decoders"))
        for command in (SCORE, PLAN, TRAIN)
    ),
    Hostile("tokenizer: pads of 10^9", models(_tokenizer(_padded), SCORE), NO_NEED),
    Hostile("tokenizer: a text 100,000 times", models(_tokenizer(_repeated), PLAN), NO_NEED),
    Hostile("tokenizer: a pattern that repeats what repeats", models(_pattern("(a+)+$"), PLAN), NO_NEED),
    Hostile("tokenizer: a pattern of choices that repeat", models(_pattern("(?:x*|y*)*z"), SCORE), NO_NEED),
    Hostile("tokenizer: 4 GB", models(sparse("tokenizer.json", 4 << 30), PLAN), "tokenizer.json is too large"),
    Hostile("tokenizer: 4 GB, to score", models(sparse("tokenizer.json", 4 << 30), SCORE), "tokenizer.json is too large"),
    *(
        Hostile(f"model: a pipe for {name}", models(piped(name), SCORE), name)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
    ),
    Hostile("model: a device for its settings", models(linked("config.json", "/dev/zero")), "model"),
    Hostile("model: a device for its tokenizer", models(linked("tokenizer_config.json", "/dev/zero"), SCORE), "not a regular file"),
    Hostile("model: a device for its weights", models(linked("model.safetensors", "/dev/zero")), "not a regular file"),
    Hostile("model: a link around itself", models(linked("generation_config.json", "generation_config.json")), "leads nowhere"),
    Hostile("model: a folder for its weights", models(foldered("model.safetensors")), "is a folder"),
    Hostile("model: a folder for its settings", models(foldered("config.json")), "model"),
    Hostile("model: weights of 8 TB", models(_huge_weights), "model"),
    Hostile("model: a template of 4 GB", models(sparse("chat_template.jinja", 4 << 30), SCORE), "too large"),
    Hostile("model: an adapter on another model", models(_adapter), "holds an adapter"),
    Hostile("model: an adapter, to train", models(_adapter, TRAIN[:-1]), "holds an adapter"),
    Hostile("model: an adapter, to score", models(_adapter, SCORE), "holds an adapter"),
    *(
        Hostile(f"model: {name}={value!r:.20}", models(config(**{name: value})), said)
        for name, value, said in (
            ("vocab_size", 10**12, "model"), ("hidden_size", 10**9, "model"), ("intermediate_size", 10**12, "far larger"),
            ("num_key_value_heads", 10**9, MORE), ("num_experts", 10**9, MORE), ("num_labels", 10**9, MORE),
            ("encoder_layers", 10**9, MORE), ("depths", [10**9], MORE),
            ("text_config", {"num_hidden_layers": 10**9}, MORE), ("attn_implementation", "evil/kernel", "code from elsewhere"),
            ("use_pretrained_backbone", True, "weights from elsewhere"), ("vocab_size", -1, "model"),
            ("hidden_size", 10**400, "model"),
        )
    ),
    Hostile("model: a billion layers, to score", models(config(num_hidden_layers=10**9), SCORE), MORE),
    Hostile("model: a million layers", models(config(num_hidden_layers=10**6), VERIFY), MORE),
    *(
        Hostile(f"picture: {name}, to score", pictures(make), f"decode/{kind}", 3)
        for name, make, kind in (
            ("a pipe", os.mkfifo, "unreadable_image"), ("a folder", Path.mkdir, "unreadable_image"),
            ("an endless device", lambda path: path.symlink_to("/dev/zero"), "unreadable_image"),
            ("a link around itself", lambda path: path.symlink_to("a.png"), "unreadable_image"),
            ("60,000 x 60,000 pixels", _bomb, "too_many_pixels"),
        )
    ),
    Hostile("model: more positions than atoms", models(config(max_position_embeddings=10**80)), "packed", 0),
]  # fmt: skip
