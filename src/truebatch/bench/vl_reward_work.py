"""What the benchmark of judging runs: pairs with pictures, a processor made in memory, and clocks on the real pipeline."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from truebatch.bench.scoring_work import IMAGE, VISION_END, VISION_START
from truebatch.scoring import prompting
from truebatch.scoring.inprocess import ModelBackend
from truebatch.scoring.journal import Journal
from truebatch.systems.vl_reward import stages
from truebatch.systems.vl_reward.benchmark import Pair, Wanted, read_benchmark
from truebatch.systems.vl_reward.shapes import make_records

VIDEO = 6
SPECIAL = (
    "<pad>",
    "<s>",
    "</s>",
    "<image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<video>",
    "<|im_start|>",
    "<|im_end|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><image><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = ("decode", "prepare", "model", "parse", "journal")
Now = Callable[[], float]


def make_processor(vocabulary: int, *, most_pixels: int) -> Any:
    """A Qwen3-VL processor without a file: bytes as tokens, further tokens up to the model's vocabulary."""
    tokenizer = _tokenizer(vocabulary)
    images = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 32 * 32, "longest_edge": most_pixels}
    )
    made: Any = transformers.Qwen3VLProcessor.__new__(transformers.Qwen3VLProcessor)
    # Its own way to make one also wants a video processor, which needs torchvision; no sample here has a video.
    made.image_processor, made.tokenizer, made.video_processor = images, tokenizer, None
    made.chat_template = TEMPLATE
    made.image_token, made.video_token, made.image_token_id, made.video_token_id = "<image>", "<video>", IMAGE, VIDEO
    made.image_ids, made.video_ids = [IMAGE], [VIDEO]
    made.vision_start_token, made.vision_start_token_id = "<|vision_start|>", VISION_START
    made.vision_end_token, made.vision_end_token_id = "<|vision_end|>", VISION_END
    return made


def _tokenizer(vocabulary: int) -> Any:
    vocab = {token: at for at, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    vocab |= {f"<{at}>": at for at in range(len(vocab), vocabulary)}  # what a model says in them can be told apart
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    named = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False))
    made: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False, **named
    )
    made.image_token, made.image_token_id = "<image>", IMAGE
    made.video_token, made.video_token_id = "<video>", VIDEO
    made.chat_template = TEMPLATE
    return made


def make_pairs(folder: Path, number: int, sides: Sequence[tuple[int, int]]) -> Sequence[Pair]:
    """A benchmark file of this many pairs, with the embedded benchmark's words and pictures as busy as photographs."""
    draw = np.random.default_rng(0)
    records = make_records(number)
    for at, record in enumerate(records):
        record["src_img_b64"] = base64.b64encode(_picture(draw, sides[at % len(sides)])).decode()
    path = folder / "benchmark.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return read_benchmark(path, Wanted()).pairs


def _picture(draw: np.random.Generator, size: tuple[int, int]) -> bytes:
    from PIL import Image

    width, height = size
    coarse = draw.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(held, "PNG")
    return held.getvalue()


def turn_around(image: Any, instruction: str, seed: int) -> Any:
    """The edit of this benchmark: what is judged has random weights, so any other picture will do."""
    return image.rotate(180)


@dataclass(slots=True)
class Clock:
    """Seconds by part of the pipeline, over all threads."""

    now: Now = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its seconds added to a part."""

        @wraps(call)
        def run(*args: Any, **named: Any) -> Any:
            began = self.now()
            try:
                return call(*args, **named)
            finally:
                with self.lock:
                    self.seconds[part] += self.now() - began

        return run

    def own(self) -> dict[str, float]:
        """The parts without what is counted inside of another: preparing holds decoding."""
        return {**self.seconds, "prepare": self.seconds["prepare"] - self.seconds["decode"]}


PLACES: tuple[tuple[Any, str, str], ...] = (
    (prompting, "open_picture", "decode"),
    (prompting.Prompting, "prepare", "prepare"),
    (ModelBackend, "judge", "model"),
    (stages, "parse_answer", "parse"),
    (Journal, "begin", "journal"),
    (Journal, "commit", "journal"),
)
"""Where the pipeline does each part. It runs as it is; only these calls are timed from outside."""


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """While open, the parts of every run are timed."""
    with ExitStack() as after:
        for owner, name, part in PLACES:
            before = getattr(owner, name)
            after.callback(setattr, owner, name, before)
            setattr(owner, name, clock.timed(part, before))
        yield
