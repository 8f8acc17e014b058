"""docs/architecture.md: files and rooms are there, in the order of the layers, and the pictures are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src/truebatch"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"`([a-z_]+(?:/|\.py))`", "\n".join(re.findall(r"^\| `.*?\|", PAGE, re.MULTILINE)))


@pytest.fixture(scope="module")
def drawn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures_draw", ROOT / "docs/pictures/draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def test_the_fifteen_files_to_read_first_are_there():
    files = re.findall(r"^\d+\. `([^`]+)`", PAGE, re.MULTILINE)
    assert len(files) == len(set(files)) == 15
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_map_has_every_room_once():
    folders = {
        f"{file.parent.name}/" for file in LIBRARY.glob("*/__init__.py") if len(list(file.parent.glob("*.py"))) > 1
    }
    assert len(ROOMS) == len(set(ROOMS))
    assert {room for room in ROOMS if room.endswith("/")} == folders
    assert [room for room in ROOMS if not (LIBRARY / room).exists()] == []


def test_the_map_is_in_the_order_of_the_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(one["layers"] for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "rooms")
    heights: dict[str, list[int]] = {}
    for height, layer in enumerate(layers):
        for module in layer.split(" : "):
            heights.setdefault(module.strip(" ()").partition(".")[0], []).append(height)
    lines = [
        [
            min(heights[room.removesuffix("/").removesuffix(".py")])
            for room in re.findall(r"`([a-z_]+(?:/|\.py))`", line)
        ]
        for line in re.findall(r"^\| `.*?\|", PAGE, re.MULTILINE)
    ]
    tops = [min(line) for line in lines]
    assert tops == sorted(tops)


def test_the_pictures_are_those_of_their_maker_and_name_files_that_are_there(drawn):
    for file, text in drawn.pictures().items():
        kept = (drawn.FOLDER / file).read_text(encoding="utf-8")
        assert kept == text, "run `python docs/pictures/draw.py` and keep the pictures"
    named = [one.file for way in drawn.WAYS.values() for one in way]
    assert [file for file in named if not (LIBRARY / file).is_file()] == []
