"""Two stages, each a run of its own with a journal: edit everything, then judge everything; never both models at once.

pairs -> edits/ + pictures/ -> unload -> judges -> scores/ -> rows
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from truebatch.errors import ConfigError, RunError, TruebatchError
from truebatch.io.atomic_files import hash_file, write_bytes
from truebatch.io.images import rgb_image
from truebatch.planning.keyed_rng import keyed_hash
from truebatch.scoring.backends.interface import Backend, Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.memory_budget import MEASURED, budget_of, settle_limits
from truebatch.scoring.readouts import read_score
from truebatch.scoring.readouts.scale import Scale
from truebatch.scoring.runner import RunConfig, RunTotals, run_samples
from truebatch.scoring.store.export import read_rows
from truebatch.scoring.store.input_index import INPUT, list_samples
from truebatch.scoring.store.manifest import MANIFEST
from truebatch.training.memory.oom import is_out_of_memory
from truebatch_systems.vl_reward.console import Say, ScoreLog, logged, say_category
from truebatch_systems.vl_reward.data.dataset import EditPair, decode_image, source_hash
from truebatch_systems.vl_reward.data.prompts import CategoryPrompt, build_messages, fill_prompt, prompt_of
from truebatch_systems.vl_reward.editors import Editor
from truebatch_systems.vl_reward.eval.statistics import Row

EDITS, SCORES, PICTURES, SOURCES = "edits", "scores", "pictures", "sources"
QUICK = 1
"""How hard PNG files are compressed: the default takes several times as long and saves a few percent of a photograph."""
CAPTIONS = ("The original image:", "The edited image:")
_ONE_AT_A_TIME = Limits(level="plan", rows=1)
_SAFE = re.compile(r"[\w.()\- ]+")
_MOST_BYTES = 160
"""Of a name; a draft of the file has a longer one, and 255 is the most."""


@dataclass(slots=True)
class EditBackend:
    """An editor as a backend of the scoring room: its answer is a picture on the disk."""

    editor: Editor
    folder: Path
    pairs: Mapping[str, EditPair]
    """By id."""
    loading: Lock = field(default_factory=Lock)
    """Shared by all editors of a run: one after another is loaded."""
    is_loaded: bool = False

    def describe(self) -> Mapping[str, Any]:
        """What the editor says of itself."""
        return dict(self.editor.describe())

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """One edit is like another."""
        return Cost(tokens=1)

    def prepare(self, sample: ScoreRequest, /) -> tuple[ScoreRequest, Any]:
        """The source picture, decoded."""
        try:
            return sample, decode_image(self.pairs[sample.id])
        except TruebatchError as error:
            raise SampleError("decode", "source_image", f"{error.wrong}: {error.seen}") from error

    def judge(self, prepared: Sequence[tuple[ScoreRequest, Any]], /) -> Sequence[ScoreResponse | SampleError]:
        """Edit one picture after another; what raises is that pair's own failure. The first one loads the editor."""
        self._load()
        return [self._edit(asked, image) for asked, image in prepared]

    def _load(self) -> None:
        if self.is_loaded:
            return
        with self.loading:
            self.is_loaded = True  # also when loading fails: what it took until then is given back
            try:
                self.editor.load()
            except ConfigError:
                raise
            except Exception as error:  # no pair is to blame for it
                raise ConfigError(
                    "the editor cannot be loaded", seen=f"{type(error).__name__}: {str(error)[:300]}", do="see above"
                ) from error

    def _edit(self, asked: ScoreRequest, image: Any) -> ScoreResponse | SampleError:
        name = str(asked.options["file"])
        try:
            edited = self.editor.edit(image, asked.user, seed=int(asked.options["seed"]), name=name)
            held = io.BytesIO()
            rgb_image(edited).save(held, "PNG", compress_level=QUICK)
        except Exception as error:  # an editor of others may raise anything: the pair is then not edited
            if is_out_of_memory(error):
                raise
            if "CUDA error" in str(
                error
            ):  # nothing runs on this GPU any more: all further pairs would fail for nothing
                raise ConfigError(
                    "an editor has lost its GPU",
                    seen=f"at {asked.id!r}: {str(error)[:200]}",
                    do="run the same command again to resume; a pair that does it again is recorded as failed",
                ) from error
            return SampleError("model", "edit_failed", f"{type(error).__name__}: {error}")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, held.getvalue())
        return ScoreResponse(score=None, output={"file": name, "sha256": hashlib.sha256(held.getvalue()).hexdigest()})

    def close(self) -> None:
        """Unload the editor, if it was loaded."""
        if self.is_loaded:
            self.editor.unload()


@dataclass(frozen=True)
class ParsedBackend:
    """A backend that gives texts, with the reader of answers behind it: the same for all of them."""

    inner: Backend
    scale: Scale

    def describe(self) -> Mapping[str, Any]:
        """The inner one, and the scale."""
        scale = {"kind": self.scale.kind, "least": self.scale.least, "most": self.scale.most, "pair": "minimum"}
        return {**self.inner.describe(), "scale": scale}

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """As the inner one."""
        return self.inner.cost(sample)

    def prepare(self, sample: ScoreRequest, /) -> Any:
        """As the inner one."""
        return self.inner.prepare(sample)

    def judge(self, prepared: Sequence[Any], /) -> Sequence[ScoreResponse | SampleError]:
        """The texts, read."""
        return [_parsed(answer, self.scale) for answer in self.inner.judge(prepared)]

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()


@dataclass(frozen=True)
class ParsedServer(ParsedBackend):
    """The same for a server, which answers requests as they are done."""

    def as_completed(
        self, prepared: Iterable[tuple[Any, Any]], is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[Any, ScoreResponse | SampleError]]:
        """Each answer as it comes, read."""
        for tag, answer in self.inner.as_completed(prepared, is_stopped):  # type: ignore[attr-defined]
            yield tag, _parsed(answer, self.scale)


def _parsed(answer: ScoreResponse | SampleError, scale: Scale) -> ScoreResponse | SampleError:
    if isinstance(answer, SampleError) or answer.score is not None:
        return answer  # a score that is read from probabilities needs no parser
    text = answer.output.get("text")
    if not isinstance(text, str):
        raise ConfigError(
            "a judge must give texts", seen=f"output {sorted(answer.output)}", do="use a readout that generates"
        )
    return read_score(answer, scale)


def edit_all(
    pairs: Sequence[EditPair], editors: Sequence[Editor], run: Path, *, seed: int, how: RunConfig
) -> RunTotals:
    """Stage 1: every pair without a picture is edited, by whichever editor is free; each is loaded once, if needed.

    The seed of a pair is its own, else made from the seed and its id: the number of editors does not matter.
    """
    asked = [_edit_of(pair, seed) for pair in pairs]
    by_id, lock = {pair.id: pair for pair in pairs}, Lock()
    backends = [EditBackend(editor, run / PICTURES, by_id, lock) for editor in editors]
    with ExitStack() as after:
        for backend in backends:
            after.callback(backend.close)
        return run_samples(list_samples(asked), backends, run / EDITS, _ONE_AT_A_TIME, how)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """How edited pictures are judged."""

    prompts: Mapping[str, CategoryPrompt]
    scale: Scale = field(default_factory=Scale)
    compare_with_original: bool = True
    """Show the source picture too."""
    limits: Limits = field(default_factory=Limits)


def judge_all_edits(
    pairs: Sequence[EditPair],
    open_judges: Callable[[], Backend | list[Backend]],
    run: Path,
    judging: Judging,
    how: RunConfig,
    say: Say | None = None,
) -> RunTotals:
    """Stage 2: every edited picture is judged once; a pair without one is not judged. The judges are opened here.

    Several judges each take the next batch when they are free; batches are planned before, so that scores are the same.
    """
    edited = _edited(pairs, run)
    with ThreadPoolExecutor(how.threads, thread_name_prefix="sources") as pool:
        ask = partial(_question, edited=edited, run=run, judging=judging)
        asked = list(pool.map(ask, [pair for pair in pairs if pair.id in edited]))
    with ExitStack() as after:
        found = open_judges()
        opened = found if isinstance(found, list) else [found]
        judges: list[Backend] = []
        log = None if say is None else ScoreLog(say, judging.limits.rows, _by_category(asked))
        for judge in opened:
            after.callback(judge.close)
            is_server = hasattr(judge, "as_completed")
            parsed = (ParsedServer if is_server else ParsedBackend)(judge, judging.scale)
            judges.append(parsed if log is None else logged(parsed, log))
        (run / SCORES).mkdir(parents=True, exist_ok=True)
        limits = settle_limits(judging.limits, run / SCORES, partial(_fit, opened, asked))
        finished = run_samples(list_samples(asked), judges, run / SCORES, limits, how)
    if log is not None and finished.judged:
        _say_resumed(log, pairs, run)
    return finished


def _by_category(asked: Sequence[ScoreRequest]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in asked:
        found.setdefault(str(one.meta["category"]), []).append(one.id)
    return found


def _say_resumed(log: ScoreLog, pairs: Sequence[EditPair], run: Path) -> None:
    """Log the end of the categories of which an earlier process judged a part, and of those with equal pairs."""
    scores = {row.id: row.score for row in read_results(pairs, run)}
    for name in log.images:
        if name in log.begun and name not in log.ended:
            found = [score for one in log.images[name] if (score := scores[one]) is not None]
            say_category(log.say, name, len(log.images[name]), sum(found) / len(found) if found else None)


def _fit(judges: Sequence[Backend], asked: Sequence[ScoreRequest]) -> int | None:
    """The largest safe budget of cells, measured where the first judge is; None where memory is not measured."""
    some = asked[:: max(1, len(asked) // MEASURED)]
    return budget_of(judges[0], some)


def read_results(pairs: Sequence[EditPair], run: Path) -> list[Row]:
    """A row for every pair, from the two journals alone."""
    edits, scores = stage_rows(run / EDITS), stage_rows(run / SCORES)
    return [Row(pair.id, pair.category, *_state(edits.get(pair.id), scores.get(pair.id))) for pair in pairs]


def stage_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of a stage by id; none where it has not begun."""
    return {row["id"]: row for row in read_rows(folder)} if has_begun(folder) else {}


def has_begun(folder: Path) -> bool:
    """Whether a stage has a journal and a list of its samples."""
    return (folder / INPUT).is_file() and (folder / MANIFEST).is_file()


def _edited(pairs: Sequence[EditPair], run: Path) -> dict[str, Mapping[str, Any]]:
    """What was edited, by id, with file and hash; a picture that is not the one of the journal is refused."""
    wanted = {pair.id for pair in pairs}
    rows = stage_rows(run / EDITS)
    found = {name: row["output"] for name, row in rows.items() if row["status"] == "ok" and name in wanted}
    for name, output in found.items():
        path = run / PICTURES / output["file"]
        if not path.is_file() or hash_file(path).sha256 != output["sha256"]:
            raise RunError(
                f"the picture of {name!r} is not the one that was edited",
                seen=f"{path} was changed" if path.is_file() else f"{path} is gone",
                do="bring it back, or begin anew in another folder: evaluation.output_dir",
            )
    return found


def _state(edit: Mapping[str, Any] | None, score: Mapping[str, Any] | None) -> tuple[str, float | None]:
    if edit is None or edit["status"] == "pending":
        return "pending", None
    if edit["status"] == "failed":
        return "edit_failed", None
    is_judged = score is not None and score["meta"].get("picture") == edit["output"]["sha256"]
    if score is None or not is_judged or score["status"] == "pending":
        return "pending", None
    if score["status"] == "ok":
        return "ok", score["score"]
    return (score["kind"] if score["stage"] == "parse" else "judge_failed"), None


def picture_name(pair: EditPair) -> str:
    """Where a pair's picture is kept: `<category>/<id>.png`, made safe where a name could lead elsewhere."""
    parts = [pair.category, pair.id]
    if all(_SAFE.fullmatch(part) and part.strip(". ") and len(part.encode()) <= _MOST_BYTES for part in parts):
        return f"{parts[0]}/{parts[1]}.png"
    return f"other/{hashlib.blake2b(os.fsencode('/'.join(parts)), digest_size=12).hexdigest()}.png"


def pair_seed(pair: EditPair, seed: int) -> int:
    """The pair's own seed, else one from the run's seed and the pair's id."""
    if pair.seed is not None:
        return pair.seed
    number = int.from_bytes(hashlib.blake2b(pair.id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    bits = keyed_hash(seed, 0, "edit", np.array([number >> 1], dtype=np.int64))
    return int(bits[0] >> np.uint64(33))


def _edit_of(pair: EditPair, seed: int) -> ScoreRequest:
    options = {"seed": pair_seed(pair, seed), "file": picture_name(pair), "source": source_hash(pair)}
    return ScoreRequest(id=pair.id, user=pair.instruction, options=options, meta={"category": pair.category})


def _question(pair: EditPair, *, edited: Mapping[str, Mapping[str, Any]], run: Path, judging: Judging) -> ScoreRequest:
    output = edited[pair.id]
    prompt, picture = prompt_of(judging.prompts, pair.category), str(run / PICTURES / output["file"])
    images = [str(source_file(pair, run)), picture] if judging.compare_with_original else [picture]
    captions = CAPTIONS if judging.compare_with_original else ("",)
    messages = build_messages(prompt.system_prompt, fill_prompt(prompt, pair), captions)
    meta = {"category": pair.category, "picture": output["sha256"]}
    return ScoreRequest(id=pair.id, messages=messages, images=images, meta=meta)


def source_file(pair: EditPair, run: Path) -> Path:
    """The source picture as RGB, named by its content: what the judge sees is what the editor saw."""
    path = run / SOURCES / f"{source_hash(pair)[:32]}.png"
    if not path.is_file():
        held = io.BytesIO()
        decode_image(pair).save(held, "PNG", compress_level=QUICK)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, held.getvalue())
    return path
