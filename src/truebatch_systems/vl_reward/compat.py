"""The names of the original script over the scoring room: `Qwen3VLRewardModel` with `score` and `batch_score`.

Where the original script gave 5.0 for an answer it could not read, there is None here, and `failures` says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from truebatch.errors import BatchError, ConfigError
from truebatch.generation.config import Generation
from truebatch.language.console import say
from truebatch.scoring.backends.interface import Backend, SampleError, ScoreRequest
from truebatch.scoring.backends.load import open_backend
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.bisect import FailureStats, failure, judge_all
from truebatch.scoring.readouts import Generate
from truebatch.scoring.readouts.scale import Scale
from truebatch.scoring.store.outcome import Outcome
from truebatch_systems.vl_reward.console import JUDGE, ScoreLog, logged
from truebatch_systems.vl_reward.data.prompts import build_messages
from truebatch_systems.vl_reward.stages import CAPTIONS, ParsedBackend

SYSTEM_PROMPT = "You are an image editing evaluator."
USER_PROMPT = 'Rate the edited image from 0 to 10. Answer as a JSON object: {"score": 7.5}'
"""What is asked where no prompts are given."""


class Qwen3VLRewardModel:
    """A judge of edited pictures. `score` and `batch_score` give the same numbers; None where there is none."""

    def __init__(
        self,
        model_name: str | Path = "",
        *,
        backend: Backend | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_new_tokens: int = 128,
        cells: int = 32768,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if bool(model_name) == (backend is not None):
            raise ConfigError(
                "a judge is a model folder or a backend", seen=f"{model_name!r}, {backend}", do="give one"
            )
        readout = Generate(Generation(temperature=0.0, max_new_tokens=max_new_tokens))
        self._cells = cells
        inner = backend or open_backend(model_name, readout, Limits(cells=cells), dtype=dtype, device=device)
        self._backend = ParsedBackend(inner, Scale())
        self._say = say or _to_stderr
        self.model = getattr(inner, "model", None)
        self.processor = getattr(getattr(inner, "prompting", None), "processor", None)
        """Those of a judge in this process; None elsewhere."""
        self.failures: dict[int, Outcome] = {}
        """Of the last call: place in the list -> why there is no score."""

    def score(
        self, edited_image: Any, system_prompt: str, user_prompt: str, original_image: Any = None
    ) -> float | None:
        """The score of one picture."""
        originals = None if original_image is None else [original_image]
        return self.batch_score(
            [edited_image], [system_prompt], [user_prompt], original_images=originals, batch_size=1
        )[0]

    def batch_score(
        self,
        edited_images: Sequence[Any] | None = None,
        system_prompts: Sequence[str] | str = SYSTEM_PROMPT,
        user_prompts: Sequence[str] | str = USER_PROMPT,
        *,
        original_images: Sequence[Any] | None = None,
        batch_size: int = 4,
        use_batch_inference: bool = True,
        images: Sequence[Any] | None = None,
        padding: bool = True,
    ) -> list[float | None]:
        """A score for every picture, in order. `use_batch_inference=False` judges one by one, with the same result.

        `images` is another name of `edited_images`. One prompt may stand for all pictures. Rows of unequal length
        cannot be batched without padding: `padding=False` judges one by one too.
        """
        if (images is None) == (edited_images is None):
            raise BatchError("give the edited pictures once", seen="edited_images and images", do="give one of them")
        given = edited_images if images is None else images
        assert given is not None
        systems, users = _repeated(system_prompts, len(given)), _repeated(user_prompts, len(given))
        if not use_batch_inference or not padding:
            return self._batch_score_sequential(given, systems, users, original_images)
        asked = self._asked(given, systems, users, original_images)
        self._say(f"{JUDGE} Batch scoring {len(asked)} images with batch_size={batch_size}")
        return self._judge(asked, batch_size)

    def _batch_score_sequential(
        self,
        edited_images: Sequence[Any],
        system_prompts: Sequence[str],
        user_prompts: Sequence[str],
        original_images: Sequence[Any] | None = None,
    ) -> list[float | None]:
        """One by one: the way back."""
        return self._judge(self._asked(edited_images, system_prompts, user_prompts, original_images), 1)

    def _build_messages(
        self, edited_image: Any, system_prompt: str, user_prompt: str, original_image: Any = None
    ) -> list[dict[str, Any]]:
        """The conversation of one sample with its pictures inside, as `processor.apply_chat_template` takes it."""
        images = [edited_image] if original_image is None else [original_image, edited_image]
        messages = build_messages(system_prompt, user_prompt, _captions(len(images)))
        left = iter(images)
        for part in messages[-1]["content"]:
            if part["type"] == "image":
                part["image"] = next(left)
        return messages

    def unload_from_gpu(self) -> None:
        """Give the model's memory back."""
        self._backend.close()

    def _asked(
        self, edited: Sequence[Any], systems: Sequence[str], users: Sequence[str], originals: Sequence[Any] | None
    ) -> list[ScoreRequest]:
        sizes = {len(edited), len(systems), len(users), len(edited if originals is None else originals)}
        if len(sizes) != 1:
            raise BatchError(
                "every picture needs a system prompt and a user prompt",
                seen=f"{len(edited)} images, {len(systems)} system prompts, {len(users)} user prompts",
                do="give lists of one length",
            )
        found = []
        for at, (image, system, user) in enumerate(zip(edited, systems, users, strict=True)):
            images = [image] if originals is None else [originals[at], image]
            messages = build_messages(system, user, _captions(len(images)))
            found.append(ScoreRequest(id=str(at), messages=messages, images=images))
        return found

    def _judge(self, asked: Sequence[ScoreRequest], batch_size: int) -> list[float | None]:
        """Batches of consecutive images; one with more tokens than `cells` is cut."""
        outcomes: dict[str, Outcome] = {}
        costs = {}
        log = ScoreLog(self._say, batch_size, {"": [one.id for one in asked]})
        backend = logged(self._backend, log)
        for one in asked:
            try:
                costs[one.id] = backend.cost(one)
            except SampleError as error:
                outcomes[one.id] = failure(one.id, error)
        with left_padding(self.processor):
            for keys in plan_batches(costs, Limits(cells=self._cells, rows=batch_size, order="given")):
                outcomes |= {one.key: one for one in self._batch(backend, asked, keys)}
        self.failures = {int(key): one for key, one in outcomes.items() if one.status == "failed"}
        return [outcomes[one.id].score for one in asked]

    def _batch(self, backend: Backend, asked: Sequence[ScoreRequest], keys: Sequence[str]) -> list[Outcome]:
        ready, bad = [], []
        for key in keys:
            try:
                ready.append((key, backend.prepare(asked[int(key)])))
            except SampleError as error:
                bad.append(failure(key, error))
        return bad + judge_all(backend.judge, [key for key, _ in ready], [one for _, one in ready], FailureStats())


@contextmanager
def left_padding(processor: Any) -> Iterator[None]:
    """`processor.tokenizer.padding_side` is left inside, and what it was afterwards, also after an error."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        yield
        return
    before = tokenizer.padding_side
    tokenizer.padding_side = "left"
    try:
        yield
    finally:
        tokenizer.padding_side = before


def _captions(images: int) -> Sequence[str]:
    return ("",) if images == 1 else CAPTIONS


def _repeated(prompts: Sequence[str] | str, number: int) -> Sequence[str]:
    return [prompts] * number if isinstance(prompts, str) else prompts


def _to_stderr(line: str) -> None:
    say(line, file=sys.stderr)
