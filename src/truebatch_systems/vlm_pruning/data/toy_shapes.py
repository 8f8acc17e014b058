"""Pictures of shapes with questions that nobody answers without looking: counting, colour and position.

image number -> what is asked and answered -> which shape stands in which cell -> pixels

Every block of 16 images asks each question with each of its answers equally often. So the question alone, or the
commonest answer, is right one time in four, in any split.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, overload

import numpy as np
from PIL import Image, ImageDraw

from truebatch.errors import ConfigError
from truebatch.testing.toy_images import SHAPES, draw_shape

COLOURS = {"red": (236, 56, 48), "green": (48, 208, 72), "blue": (72, 104, 240), "yellow": (236, 212, 44)}
COUNTS = ("zero", "one", "two", "three")
EDGES = ("top", "bottom", "left", "right")
CATEGORIES = ("colour", "position", "count")
QUESTIONS = {
    "colour": "What color is the {shape}",
    "position": "Where is the {shape}",
    "count": "How many shapes are {colour}",
}
BLOCK = 16
"""Images after which every question has had each of its answers equally often."""
CHANCE = 0.25
MIXED = {"large": 4, "small": 8}
"""Cells of a side of the two kinds of mixed pictures."""
MIXED_SIDE = 112
"""Pixels of a side of a mixed picture."""
Split = Literal["train", "validation", "test"]
_FIRST = {"train": 0, "validation": 10**6, "test": 2 * 10**6}
"""The number of a split's first image: no image is in two splits."""
GROUND = (122, 116, 104)
"""The mean colour of the images CLIP was made for: an empty cell is near zero to the vision tower."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape in one cell of the picture."""

    shape: str
    colour: str
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What one image shows, and the answers to the three questions about it."""

    number: int
    things: tuple[Thing, ...]
    asked_shape: str
    asked_colour: str
    answers: Mapping[str, str]
    """Category -> answer."""


class DrawnSamples(Sequence[Mapping[str, Any]]):
    """Samples that are drawn when they are asked for, by number or as a slice."""

    __slots__ = ()

    @abstractmethod
    def _draw(self, at: int) -> Mapping[str, Any]:
        """The sample of a number from 0 on."""

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return self._draw(at % len(self))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[at] for at in range(len(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeQuestions(DrawnSamples):
    """Samples of one split, three questions an image; drawn when asked for, always the same for the same seed."""

    images: int
    split: Split = "train"
    seed: int = 0
    grid: int = 4
    """Cells of a side."""
    cell: int = 14
    """Pixels of a side of a cell: one patch of the tiny vision tower."""
    things: int = 6
    """Shapes in an image."""
    _first: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.split not in _FIRST:
            raise ConfigError("a split is not known", seen=f"split={self.split!r}", do=f"use one of {tuple(_FIRST)}")
        if self.grid < 3 or not 4 <= self.things <= self.grid**2 or not 0 <= self.images <= 10**6:
            raise ConfigError(
                "such pictures of shapes cannot be made",
                seen=f"images={self.images}, grid={self.grid}, things={self.things}",
                do="use at most a million images, a grid of 3 or more, and 4 or more things that fit into it",
            )
        object.__setattr__(self, "_first", _FIRST[self.split])

    def __len__(self) -> int:
        return self.images * len(CATEGORIES)

    def _draw(self, at: int) -> Mapping[str, Any]:
        number, category = divmod(at, len(CATEGORIES))
        return self._sample(self._first + number, CATEGORIES[category])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[at] for at in range(len(self)))

    def _sample(self, number: int, category: str) -> Mapping[str, Any]:
        scene = make_scene(number, seed=self.seed, grid=self.grid, things=self.things)
        question = QUESTIONS[category].format(shape=scene.asked_shape, colour=scene.asked_colour)
        answer = scene.answers[category]
        return {
            "id": f"{self.split}-{number - self._first}-{category}",
            "image": draw_scene(scene, grid=self.grid, cell=self.cell, seed=self.seed),
            "image_id": number,
            "question": question,
            "answer": answer,
            "answers": [answer],
            "choices": (),
            "category": category,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedShapes(DrawnSamples):
    """Blocks of pictures with few large cells and with many small ones in turn, all of one size in pixels.

    What a smaller image size costs depends on the picture: large shapes survive it, small ones do not.
    """

    images: int
    """Of each kind."""
    split: Split = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.images % BLOCK:
            raise ConfigError(
                "blocks of large and of small shapes take turns, so each kind has whole blocks",
                seen=f"images={self.images}",
                do=f"give a multiple of {BLOCK}",
            )

    def _kinds(self) -> dict[str, ShapeQuestions]:
        shared: dict[str, Any] = {"images": self.images, "split": self.split, "seed": self.seed}
        return {name: ShapeQuestions(grid=grid, cell=MIXED_SIDE // grid, **shared) for name, grid in MIXED.items()}

    def __len__(self) -> int:
        return self.images * len(CATEGORIES) * len(MIXED)

    def _draw(self, at: int) -> Mapping[str, Any]:
        per_block = BLOCK * len(CATEGORIES)
        block, inside = divmod(at, per_block)
        turn, which = divmod(block, len(MIXED))
        name = tuple(MIXED)[which]
        found = self._kinds()[name][turn * per_block + inside]
        return {
            **found, "id": f"{found['id']}-{name}", "image_id": f"{found['image_id']}-{name}",
            "category": f"{name} {found['category']}",
        }  # fmt: skip


@lru_cache(maxsize=4096)
def make_scene(number: int, *, seed: int = 0, grid: int = 4, things: int = 6) -> Scene:
    """What image `number` shows. One shape is there once; its colour and place are asked, and how many have a colour."""
    colours = tuple(COLOURS)
    block, place = divmod(number, BLOCK)
    shape, colour = place % 4, place // 4
    edge, count = (colour + block) % 4, (shape + block) % 4
    counted = (colour + 1 + block % 3) % 4
    draw = np.random.default_rng([seed, number])
    cells = [int(one) for one in draw.permutation(grid * grid)]
    asked_cell = next(cell for cell in cells if edge_of(*divmod(cell, grid), grid=grid) == EDGES[edge])
    cells.remove(asked_cell)
    found = [Thing(SHAPES[shape], colours[colour], *divmod(asked_cell, grid))]
    others = [one for one in range(4) if one != counted]
    for at in range(things - 1):
        other = counted if at < count else others[int(draw.integers(3))]
        found.append(Thing(SHAPES[(shape + 1 + int(draw.integers(3))) % 4], colours[other], *divmod(cells[at], grid)))
    answers = {"colour": colours[colour], "position": EDGES[edge], "count": COUNTS[count]}
    return Scene(number, tuple(found), SHAPES[shape], colours[counted], answers)


def edge_of(row: int, column: int, *, grid: int) -> str | None:
    """The edge a cell lies at; None for corners, which lie at two, and for cells inside."""
    at = [row == 0, row == grid - 1, column == 0, column == grid - 1]
    return EDGES[at.index(True)] if sum(at) == 1 else None


@lru_cache(maxsize=4096)
def _pixels(scene_number: int, things: tuple[Thing, ...], grid: int, cell: int, seed: int) -> Image.Image:
    draw = np.random.default_rng([seed, scene_number, 1])
    noise = draw.integers(-6, 7, size=(grid * cell, grid * cell, 3))
    picture = Image.new("RGB", (grid * cell, grid * cell), GROUND)
    pen = ImageDraw.Draw(picture)
    for thing in things:
        shade = tuple(int(np.clip(part + draw.integers(-14, 15), 0, 255)) for part in COLOURS[thing.colour])
        _draw_thing(pen, thing, cell, int(draw.integers(0, 2)), shade)
    return Image.fromarray(np.clip(np.asarray(picture, dtype=np.int64) + noise, 0, 255).astype(np.uint8))


def draw_scene(scene: Scene, *, grid: int = 4, cell: int = 14, seed: int = 0) -> Image.Image:
    """The image of a scene; sizes and shades differ a little, and there is noise on every pixel."""
    return _pixels(scene.number, scene.things, grid, cell, seed)


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, cell: int, inset: int, shade: tuple[int, ...]) -> None:
    left, top = thing.column * cell + 1 + inset, thing.row * cell + 1 + inset
    right, bottom = (thing.column + 1) * cell - 2 - inset, (thing.row + 1) * cell - 2 - inset
    draw_shape(pen, thing.shape, (left, top, right, bottom), shade)
