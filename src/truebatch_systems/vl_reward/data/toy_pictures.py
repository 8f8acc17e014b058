"""The embedded benchmark: pictures of shapes, instructions about them, and edits that are right or wrong by construction.

A scripted judge compares the edit with what was asked for, so that every score is known beforehand.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truebatch.errors import DataError
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.inputs.images import open_image
from truebatch.testing.toy_images import draw_shape
from truebatch_systems.vl_reward.data.prompts import CategoryPrompt

COLOURS = {"red": (200, 40, 40), "green": (40, 160, 70), "blue": (50, 80, 200), "yellow": (220, 190, 40)}
SHAPES = ("square", "circle", "triangle")
CORNERS = {"left": (0.27, 0.5), "right": (0.73, 0.5), "top": (0.5, 0.27), "bottom": (0.5, 0.73)}
SIDES = ((96, 96), (160, 96), (96, 160), (224, 160))
CHINESE = {
    "red": "红色", "green": "绿色", "blue": "蓝色", "yellow": "黄色", "left": "左边", "right": "右边",
    "top": "上面", "bottom": "下面", "square": "方块", "circle": "圆", "triangle": "三角形",
}  # fmt: skip
PROMPTS = {
    name: CategoryPrompt(
        system_prompt="You judge one edit of a simple picture. Answer with a JSON object: the score from 0 to 10.",
        user_prompt_template='{original_description} It was asked: {edit_instruction} Answer as {{"score": 7.5}}.',
    )
    for name in ("physical", "referential")
}


@dataclass(frozen=True, slots=True)
class ToyScene:
    """One shape on a white ground."""

    shape: str
    colour: str
    place: str
    size: tuple[int, int]


def make_records(number: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Records of a benchmark file: half ask for another colour, half for another place."""
    draw = np.random.default_rng(seed)
    return [_record(index, draw) for index in range(number)]


def edit_picture(image: Any, instruction: str, *, is_right: bool = True) -> Any:
    """The picture after an instruction of `make_records`; a wrong edit does something else that was not asked for."""
    scene = read_scene(image)
    kind, target = read_instruction(instruction)
    choices = list(COLOURS if kind == "colour" else CORNERS)
    wanted = target if is_right else next(c for c in choices if c not in (target, getattr(scene, kind)))
    changed = replace(scene, colour=wanted) if kind == "colour" else replace(scene, place=wanted)
    return draw_scene(changed)


def read_instruction(text: str) -> tuple[str, str]:
    """What an instruction of `make_records` asks for, in either language: (`colour` or `place`, its English name)."""
    words = text.rstrip(".").split()
    for kind, names in (("colour", COLOURS), ("place", CORNERS)):
        for name in names:
            if name in words or CHINESE[name] in text:
                return kind, name
    raise DataError("this is no instruction about shapes", seen=text[:200], do="use those of `make_records`")


def draw_scene(scene: ToyScene) -> Any:
    """The picture of a scene."""
    from PIL import Image, ImageDraw

    width, height = scene.size
    image = Image.new("RGB", scene.size, "white")
    x, y = (share * side for share, side in zip(CORNERS[scene.place], scene.size, strict=True))
    r = min(width, height) * 0.2
    draw_shape(ImageDraw.Draw(image), scene.shape, (x - r, y - r, x + r, y + r), COLOURS[scene.colour])
    return image


def read_scene(image: Any) -> ToyScene:
    """What a picture of `draw_scene` shows, from its pixels."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.int64)
    is_drawn = (np.abs(pixels - 255).sum(axis=-1)) > 60
    ys, xs = np.nonzero(is_drawn)
    mean = pixels[is_drawn].mean(axis=0)
    colour = min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum()))
    middle = ((xs.min() + xs.max()) / 2 / image.width, (ys.min() + ys.max()) / 2 / image.height)
    place = min(CORNERS, key=lambda name: float(np.hypot(*(np.array(middle) - CORNERS[name]))))
    share = is_drawn.sum() / ((xs.max() - xs.min() + 1) * (ys.max() - ys.min() + 1))
    shape = "square" if share > 0.95 else "circle" if share > 0.65 else "triangle"
    return ToyScene(shape, colour, place, image.size)


@dataclass(frozen=True, slots=True)
class ShapesJudge:
    """A judge that reads pictures as `read_scene` does: 10 for what was asked, 5 for half of it, 0 otherwise."""

    answers: Mapping[str, str] | None = None
    """Answers by sample id that are given instead: what a model might say."""

    def describe(self) -> Mapping[str, Any]:
        """There is only one."""
        return {"backend": "scripted", "model": "shapes judge"}

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """By the words."""
        return Cost(tokens=40 + len(_user_text(sample)), new_tokens=8, patches=24 * len(sample.images))

    def prepare(self, sample: ScoreRequest, /) -> tuple[ScoreRequest, list[Any]]:
        """The pictures, decoded."""
        return sample, [open_image(image) for image in sample.images]

    def judge(self, prepared: Sequence[tuple[ScoreRequest, list[Any]]], /) -> Sequence[ScoreResponse | SampleError]:
        """Texts, as a model would give them."""
        said = self.answers or {}
        texts = [said.get(asked.id) or self._judge(asked, images) for asked, images in prepared]
        return [ScoreResponse(score=None, output={"text": text, "ended": "end"}, tokens=len(text)) for text in texts]

    def _judge(self, asked: ScoreRequest, images: Sequence[Any]) -> str:
        text = _user_text(asked)
        instruction = text.partition("It was asked: ")[2].partition(" Answer as")[0]
        seen, wanted = (
            read_scene(images[-1]),
            read_scene(edit_picture(images[0], instruction)) if len(images) > 1 else None,
        )
        if wanted is None:
            is_there = read_instruction(instruction)[1] in (seen.colour, seen.place)
            return f'{{"score": {10.0 if is_there else 0.0}}}'
        parts = ("shape", "colour", "place")
        wrong = sum(getattr(seen, part) != getattr(wanted, part) for part in parts)
        return f'{{"score": {max(0.0, 10.0 - 5.0 * wrong)}}}'

    def close(self) -> None:
        """Nothing is held."""


def _user_text(sample: ScoreRequest) -> str:
    parts = sample.messages[-1]["content"]
    return str(parts[-1]["text"])


def _record(index: int, draw: Any) -> dict[str, Any]:
    scene = ToyScene(
        str(draw.choice(SHAPES)), str(draw.choice(list(COLOURS))), str(draw.choice(list(CORNERS))),
        SIDES[int(draw.integers(len(SIDES)))],
    )  # fmt: skip
    is_colour = index % 2 == 0
    choices = [c for c in (COLOURS if is_colour else CORNERS) if c not in (scene.colour, scene.place)]
    wanted = str(draw.choice(choices))
    verb = f"Paint the {scene.shape} {wanted}." if is_colour else f"Move the {scene.shape} to the {wanted}."
    chinese = f"把{CHINESE[scene.shape]}{'涂成' if is_colour else '移到'}{CHINESE[wanted]}。"
    held = io.BytesIO()
    draw_scene(scene).save(held, "PNG")
    return {
        "subset": "physical" if is_colour else "referential", "src_img_b64": base64.b64encode(held.getvalue()).decode(),
        "original_image_path": f"shapes/{index:04d}.png", "edit_instruction_en": verb, "edit_instruction": chinese,
        "original_description_en": f"A {scene.colour} {scene.shape} at the {scene.place}.",
        "original_description": f"{CHINESE[scene.place]}有一个{CHINESE[scene.colour]}的{CHINESE[scene.shape]}。",
        "rationale_short_en": "only what was asked for may change", "rationale_short": "只能改变要求的部分",
        "difficulty": ("easy", "medium", "hard")[index % 3], "tags": ["colour" if is_colour else "place"],
    }  # fmt: skip
