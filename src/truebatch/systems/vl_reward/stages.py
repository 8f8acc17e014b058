"""Two stages, each a run of its own with a journal: edit everything, then judge everything; never both models at once.

pairs -> edits/ (pictures on disk) -> unload -> judge -> scores/ -> rows
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import ConfigError, TruebatchError
from truebatch.planning.keyed import keyed_hash
from truebatch.scoring.backend import Answer, Asked, Backend, Cost, SampleError
from truebatch.scoring.batching import Limits
from truebatch.scoring.exporting import read_rows
from truebatch.scoring.listing import list_samples
from truebatch.scoring.running import Finished, Running, run_samples
from truebatch.systems.vl_reward.benchmark import Pair, decode_image
from truebatch.systems.vl_reward.editors import Editor
from truebatch.systems.vl_reward.parsing import Scale, parse_answer
from truebatch.systems.vl_reward.prompts import Prompt, build_messages, fill_prompt, prompt_of
from truebatch.systems.vl_reward.statistics import Row
from truebatch.training.durable import write_bytes

EDITS, SCORES, PICTURES = "edits", "scores", "pictures"
CAPTIONS = ("The original image:", "The edited image:")
_ONE_AT_A_TIME = Limits(level="plan", rows=1)
_SAFE = re.compile(r"[\w.()\- ]{1,80}")


@dataclass(frozen=True, slots=True)
class EditBackend:
    """An editor as a backend of the scoring room: its answer is a picture on the disk."""

    editor: Editor
    folder: Path
    pairs: Mapping[str, Pair]
    """By id."""

    def describe(self) -> Mapping[str, Any]:
        """What the editor says of itself."""
        return dict(self.editor.describe())

    def cost(self, sample: Asked, /) -> Cost:
        """One edit is like another."""
        return Cost(tokens=1)

    def prepare(self, sample: Asked, /) -> tuple[Asked, Any]:
        """The source picture, decoded."""
        try:
            return sample, decode_image(self.pairs[sample.id])
        except TruebatchError as error:
            raise SampleError("decode", "source_image", f"{error.wrong}: {error.seen}") from error

    def judge(self, prepared: Sequence[tuple[Asked, Any]], /) -> Sequence[Answer | SampleError]:
        """Edit one picture after another; what raises is that pair's own failure."""
        return [self._edit(asked, image) for asked, image in prepared]

    def _edit(self, asked: Asked, image: Any) -> Answer | SampleError:
        name = str(asked.options["file"])
        try:
            edited = self.editor.edit(image, asked.user, seed=int(asked.options["seed"]), name=name)
            held = io.BytesIO()
            edited.convert("RGB").save(held, "PNG")
        except Exception as error:  # an editor of others may raise anything: the pair is then not edited
            return SampleError("model", "edit_failed", f"{type(error).__name__}: {error}")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, held.getvalue())
        return Answer(score=None, output={"file": name, "sha256": hashlib.sha256(held.getvalue()).hexdigest()})

    def close(self) -> None:
        """The stage unloads the editor itself."""


@dataclass(frozen=True, slots=True)
class ParsedBackend:
    """A backend that gives texts, with the strict parser behind it: the same for every one of them."""

    inner: Backend
    scale: Scale

    def describe(self) -> Mapping[str, Any]:
        """The inner one, and the scale."""
        scale = {"kind": self.scale.kind, "least": self.scale.least, "most": self.scale.most, "pair": "minimum"}
        return {**self.inner.describe(), "scale": scale}

    def cost(self, sample: Asked, /) -> Cost:
        """As the inner one."""
        return self.inner.cost(sample)

    def prepare(self, sample: Asked, /) -> Any:
        """As the inner one."""
        return self.inner.prepare(sample)

    def judge(self, prepared: Sequence[Any], /) -> Sequence[Answer | SampleError]:
        """The texts, read."""
        return [_parsed(answer, self.scale) for answer in self.inner.judge(prepared)]

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()


def _parsed(answer: Answer | SampleError, scale: Scale) -> Answer | SampleError:
    if isinstance(answer, SampleError):
        return answer
    text = answer.output.get("text")
    if not isinstance(text, str):
        raise ConfigError(
            "a judge must give texts", seen=f"output {sorted(answer.output)}", do="use a readout that generates"
        )
    found = parse_answer(text, scale, is_cut=answer.output.get("ended") in ("length", "room"))
    if found.value is None:
        return SampleError("parse", found.status, found.why, dict(answer.output))
    worth = {"yes": 1.0, "no": 0.0}
    value = worth[found.value] if isinstance(found.value, str) else found.value
    score = min(value) if isinstance(value, tuple) else value
    return Answer(score=score, output={**answer.output, "value": found.value}, tokens=answer.tokens)


def edit_all(pairs: Sequence[Pair], editors: Sequence[Editor], run: Path, *, seed: int, how: Running) -> Finished:
    """Stage 1: every pair without a picture is edited, by whichever editor is free; each is loaded once.

    The seed of a pair is its own, else made from the seed and its id: the number of editors does not matter.
    """
    asked = [_edit_of(pair, seed) for pair in pairs]
    backends = [EditBackend(editor, run / PICTURES, {pair.id: pair for pair in pairs}) for editor in editors]
    with _loaded(editors):
        return run_samples(list_samples(asked), backends, run / EDITS, _ONE_AT_A_TIME, how)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """How edited pictures are judged."""

    prompts: Mapping[str, Prompt]
    scale: Scale = field(default_factory=Scale)
    compare_with_original: bool = True
    """Show the source picture too."""
    limits: Limits = field(default_factory=Limits)


def judge_all_edits(
    pairs: Sequence[Pair], open_judge: Callable[[], Backend], run: Path, judging: Judging, how: Running
) -> Finished:
    """Stage 2: every edited picture is judged once; a pair without one is not judged. The judge is opened here."""
    edited = {row["id"]: row["output"]["file"] for row in read_rows(run / EDITS) if row["status"] == "ok"}
    asked = [_question(pair, run / PICTURES / edited[pair.id], judging) for pair in pairs if pair.id in edited]
    backend = ParsedBackend(open_judge(), judging.scale)
    try:
        return run_samples(list_samples(asked), [backend], run / SCORES, judging.limits, how)
    finally:
        backend.close()


def read_results(pairs: Sequence[Pair], run: Path) -> list[Row]:
    """A row for every pair, from the two journals alone."""
    edits = {row["id"]: row for row in read_rows(run / EDITS)}
    scores = {row["id"]: row for row in read_rows(run / SCORES)} if (run / SCORES).is_dir() else {}
    return [Row(pair.id, pair.category, *_state(edits.get(pair.id), scores.get(pair.id))) for pair in pairs]


def _state(edit: Mapping[str, Any] | None, score: Mapping[str, Any] | None) -> tuple[str, float | None]:
    if edit is None or edit["status"] == "pending":
        return "pending", None
    if edit["status"] == "failed":
        return "edit_failed", None
    if score is None or score["status"] == "pending":
        return "pending", None
    if score["status"] == "ok":
        return "ok", score["score"]
    return (score["kind"] if score["stage"] == "parse" else "judge_failed"), None


def picture_name(pair: Pair) -> str:
    """Where a pair's picture is kept: `<category>/<id>.png`, made safe where a name could lead elsewhere."""
    parts = [pair.category, pair.id]
    if all(_SAFE.fullmatch(part) and part.strip(". ") for part in parts):
        return f"{parts[0]}/{parts[1]}.png"
    return f"other/{hashlib.blake2b(os.fsencode('/'.join(parts)), digest_size=12).hexdigest()}.png"


def pair_seed(pair: Pair, seed: int) -> int:
    """The pair's own seed, else one from the run's seed and the pair's id."""
    if pair.seed is not None:
        return pair.seed
    number = int.from_bytes(hashlib.blake2b(pair.id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    bits = keyed_hash(seed, 0, "edit", np.array([number >> 1], dtype=np.int64))
    return int(bits[0] >> np.uint64(33))


def _edit_of(pair: Pair, seed: int) -> Asked:
    source = pair.image if not pair.is_path else hashlib.sha256(Path(pair.image).read_bytes()).hexdigest()
    options = {
        "seed": pair_seed(pair, seed),
        "file": picture_name(pair),
        "source": hashlib.sha256(source.encode()).hexdigest(),
    }
    return Asked(id=pair.id, user=pair.instruction, options=options, meta={"category": pair.category})


def _question(pair: Pair, picture: Path, judging: Judging) -> Asked:
    prompt = prompt_of(judging.prompts, pair.category)
    images = [_source_file(pair, picture), str(picture)] if judging.compare_with_original else [str(picture)]
    captions = CAPTIONS if judging.compare_with_original else ("",)
    messages = build_messages(prompt.system_prompt, fill_prompt(prompt, pair), captions)
    return Asked(id=pair.id, messages=messages, images=images, meta={"category": pair.category})


def _source_file(pair: Pair, picture: Path) -> str:
    """The source picture beside the edited one, as RGB: what the judge sees is what the editor saw."""
    path = picture.with_name(f"{picture.stem}.source.png")
    if not path.is_file():
        held = io.BytesIO()
        decode_image(pair).save(held, "PNG")
        write_bytes(path, held.getvalue())
    return str(path)


@contextmanager
def _loaded(editors: Sequence[Editor]) -> Iterator[None]:
    """Every editor loaded once and given back, whatever happens in between."""
    ready: list[Editor] = []
    try:
        for editor in editors:
            ready.append(editor)
            editor.load()
        yield
    finally:
        for editor in ready:
            editor.unload()
