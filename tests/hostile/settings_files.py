"""Hostile settings files: YAML that would run code, grow without end, or be read as something else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hostile.making import CANARY, Hostile, put


def checked(content: bytes | str) -> Callable[[Path], Sequence[str]]:
    def make(folder: Path) -> Sequence[str]:
        put(folder, "run.yaml", content)
        return ["config", "check", "plan", "--config", "run.yaml"]

    return make


def instead(make_thing: Callable[[Path], object]) -> Callable[[Path], Sequence[str]]:
    """Something else in the place of the file."""

    def make(folder: Path) -> Sequence[str]:
        make_thing(folder / "run.yaml")
        return ["config", "check", "plan", "--config", "run.yaml"]

    return make


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
LINE = "cells: 8\n"

SETTINGS = [
    Hostile("aliases that grow to a billion values", checked(LAUGHS), "run.yaml:1 the file expands to too many"),
    Hostile("an alias inside itself", checked("a: &a [*a]\n"), "run.yaml:1"),
    Hostile(
        "a tag that calls a function", checked(f'a: !!python/object/apply:os.mkdir ["{CANARY}"]\n'), "tags are not"
    ),
    Hostile(
        "a tag that makes an object", checked("a: !!python/object/new:os.PathLike {}\n"), "run.yaml:1 YAML tags are not"
    ),
    Hostile("a tag of bytes", checked("a: !!binary aGVsbG8=\n"), "run.yaml:1 YAML tags are not supported"),
    Hostile("a tag directive", checked("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system x\n"), "run.yaml:3"),
    Hostile("a version nobody knows", checked("%YAML 9.9\n---\ncells: 8\n"), "run.yaml:1 not readable as YAML"),
    Hostile("100,000 open brackets", checked("a: " + "[" * 100_000), "run.yaml:1 is nested too deeply"),
    Hostile("100,000 open braces", checked("{a: " * 100_000), "run.yaml:1 is nested too deeply"),
    Hostile("60 levels", checked("a: " + "[" * 60 + "]" * 60), "run.yaml:1 is nested too deeply"),
    Hostile("a quarter of a million values", checked("- a\n" * 250_000), "run.yaml holds too many values"),
    Hostile("a number of 10,000 digits", checked("cells: " + "9" * 10_000 + "\n"), "cells does not accept this value"),
    Hostile("a number of 399 digits", checked("cells: " + "9" * 399 + "\n"), "cells"),
    Hostile("1e999 as a number", checked("cells: 1e999\n"), "cells does not accept this value"),
    Hostile("NaN as a number", checked("cells: .nan\n"), "cells does not accept this value"),
    Hostile("two marks inside a number", checked("cells: 1__0_\n"), "cells does not accept this value"),
    Hostile("a key twice", checked(LINE + "cells: 9\n"), "run.yaml:2 the key 'cells' is given twice"),
    Hostile("a key that is a list", checked("? [a, b]\n: 1\n"), "run.yaml:1 a key must be a plain name"),
    Hostile("a merge key", checked("a: &a {cells: 8}\n<<: *a\n"), "run.yaml:2 a key must be a plain name"),
    Hostile("two documents", checked("cells: 8\n---\ncells: 9\n"), "run.yaml:2 not readable as YAML"),
    Hostile("NUL bytes", checked(b"cells: 8\n\0\0\0\n"), "run.yaml:2 holds a NUL byte"),
    Hostile("a control character", checked("cells: 8\x08\n"), "run.yaml:1 holds a character YAML does not allow"),
    Hostile("UTF-16", checked("cells: 8\n".encode("utf-16")), "run.yaml is UTF-16, but UTF-8 is needed"),
    Hostile("UTF-32", checked("cells: 8\n".encode("utf-32")), "run.yaml is UTF-32, but UTF-8 is needed"),
    Hostile("GBK", checked("# 学习率\nnote: 批次\n".encode("gbk")), "run.yaml:1 is not UTF-8; it reads as GBK"),
    Hostile("bytes of no encoding", checked(b"cells: \xff\xfe\xfd\x80\n"), "run.yaml:1 is not UTF-8"),
    Hostile("half a character, escaped", checked('layout: "\\ud800"\n'), "layout does not accept this value"),
    Hostile("a character beyond Unicode", checked('layout: "\\U00110000"\n'), "run.yaml:1 not readable as YAML"),
    Hostile("only carriage returns", checked("cells: 8\rcellz: 9\r"), "run.yaml:2: cellz"),
    Hostile("an escape of the terminal in a key", checked('"\\e[31mcells\\e[2J": 8\n'), "unknown key"),
    Hostile("an escape of the terminal in a value", checked('layout: "\\e]0;owned\\a"\n'), "layout does not accept"),
    Hostile("a format string in a key", checked('"{0.__class__}%s%n": 8\n'), "unknown key '{0.__class__}%s%n'"),
    Hostile("rich markup in a key", checked('"[red]x[/red]": 8\n'), "unknown key '[red]x[/red]'"),
    Hostile("a full-width colon", checked("cells：8\n"), "full-width character '：'"),
    Hostile("a file of two megabytes", checked("# " + "x" * 2_000_000), "run.yaml is too large"),
    Hostile("a folder in its place", instead(Path.mkdir), "run.yaml is a folder"),
    Hostile("a pipe nobody writes to", instead(os.mkfifo), "run.yaml is not a regular file"),
    Hostile("an endless device", instead(lambda p: p.symlink_to("/dev/zero")), "run.yaml is not a regular file"),
    Hostile("a link to itself", instead(lambda p: p.symlink_to(p)), "run.yaml"),
    Hostile("a link to nothing", instead(lambda p: p.symlink_to("/nowhere/x")), "there is no file run.yaml"),
]
