"""`truebatch init`: a few files to start from, with the names and options people know from the original script."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from truebatch.errors import ConfigError
from truebatch.io.atomic_files import write_text
from truebatch.io.text_encoding import nearest
from truebatch.language.console import say
from truebatch.plugins import settings, systems

SUFFIX = ".template"


def show_init(
    system: Annotated[str, typer.Argument(help="The name of a system that comes with truebatch.")],
    out: Annotated[Path, typer.Option(help="The folder the files go to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> int:
    """Write the starting files of a system into a folder; existing files are kept unless --force is given.

    Exit code 0: written. 2: there is no such system, or a file already exists.

    Examples:

      truebatch init seqset_vae

      truebatch init vl_reward --out my-benchmark
    """
    files = starting_files(system)
    there = [name for name in files if (out / name).exists()]
    if there and not force:
        raise ConfigError(
            "a file already exists; nothing was written",
            seen=", ".join(str(out / name) for name in there),
            do="choose another folder with --out, or overwrite with --force",
        )
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(out / name, text)
        say(f"wrote {out / name}")
    return 0


def starting_files(system: str) -> dict[str, str]:
    """The files of a system to start from: relative name and text."""
    folders = starter_folders()
    known = sorted(folders)
    if system not in known:
        raise ConfigError(
            f"there are no starting files for {system!r}{nearest(system, known)}",
            seen=f"systems with starting files: {', '.join(known) or 'none'}",
            do="name one of them",
        )
    folder = folders[system]
    return {
        str(file.relative_to(folder)).removesuffix(SUFFIX): file.read_text(encoding="utf-8")
        for file in sorted(folder.rglob(f"*{SUFFIX}"))
    }


def starter_folders() -> dict[str, Path]:
    """The folders `starter` beside the modules that systems and settings are named in."""
    found = {}
    for name, target in {**settings(), **systems()}.items():
        spec = find_spec(target.partition(":")[0])
        folder = Path(spec.origin).parent / "starter" if spec is not None and spec.origin else None
        if folder is not None and any(folder.rglob(f"*{SUFFIX}")):
            found[name] = folder
    return found
