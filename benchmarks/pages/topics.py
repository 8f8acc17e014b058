"""Which page holds the tables of which result, and the figures that stand first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

FOLDER = "benchmarks"
"""Beside the page that is the summary."""
TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "training": (
        "Training",
        ("training*", "train_command*", "step_cost", "packed_training*", "trainer_accumulation", "contrastive*",
         "preference*", "sharding", "deepspeed", "exactness*", "vision_training*"),
    ),
    "attention": ("Attention", ("attention*", "sdpa*")),
    "memory": ("Memory", ("fit*", "oom*", "estimate")),
    "planning": ("Planning", ("planning",)),
    "proofs": ("Proofs and the census", ("verify", "half_precision", "census*")),
    "reliability": ("Kills, damage, resumed runs", ("reliability", "trainer_reliability", "scoring_kills*")),
    "scoring": ("Scoring", ("scoring*", "score_command*")),
    "commands": ("Commands on a GPU", ("commands*",)),
    "chinese_gpt": ("chinese_gpt", ("chinese_gpt*", "chinese_poems*")),
    "stitched_llm": ("stitched_llm", ("stitched_llm*",)),
    "seqset_vae": ("seqset_vae", ("seqset*", "nafld*")),
    "vl_reward": ("vl_reward", ("vl_reward*",)),
    "vlm_pruning": ("vlm_pruning", ("vlm_pruning*",)),
}  # fmt: skip
"""Name of the page -> its title, and the results on it; one that several would take is on the first of them."""
REST = "more"
FIRST: tuple[tuple[str, str, str, str], ...] = (
    ("training a 1.1B Llama shape, one sample at a time, H200", "training_cuda", "rows/0/tokens_per_second", "tokens/s"),
    ("the same, Hugging Face, 8 padded rows", "training_cuda", "rows/1/tokens_per_second", "tokens/s"),
    ("the same, truebatch, packed and compiled", "training_cuda", "rows/8/tokens_per_second", "tokens/s"),
    ("the bound: all samples of one length, compiled", "training_cuda", "rows/9/tokens_per_second", "tokens/s"),
    ("`train hf` without settings, between checkpoints, H200", "train_command_cuda", "rows/0/tokens_per_second_of_steps",
     "tokens/s"),
    ("judging with an 8B Qwen3-VL shape, one by one, H200", "scoring_cuda", "rows/0/samples_per_second", "labels/s"),
    ("the same in true batches, compiled", "scoring_cuda", "rows/6/samples_per_second", "labels/s"),
    ("kills at random moments", "reliability", "sweeps/random kills/trials", "kills"),
    ("of them not survived bit-equal", "reliability", "sweeps/random kills/failed", "kills"),
)  # fmt: skip
"""What it is, the result that keeps it, where in it, and its unit."""


def topic_of(name: str) -> str:
    """The page of a result."""
    found = (topic for topic, (_, patterns) in TOPICS.items() if any(fnmatchcase(name, one) for one in patterns))
    return next(found, REST)


def title_of(topic: str) -> str:
    """The title of a page."""
    return TOPICS[topic][0] if topic in TOPICS else "More results"


def linked(text: str, names: Collection[str]) -> str:
    """Names of results, parted by commas, as links to their tables."""
    parts = [part.strip() for part in text.split(",")]
    return ", ".join(link(part.strip("`")) if part.strip("`") in names else part for part in parts)


def link(name: str) -> str:
    """A link from the summary to the tables of a result."""
    return f"[{name}]({FOLDER}/{topic_of(name)}.md#{name})"


def first_figures(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any, str, str]]:
    """What, figure, unit and result of the figures that stand first, as far as they are kept."""
    found = []
    for what, name, path, unit in FIRST:
        value: Any = results.get(name)
        for part in path.split("/") if value is not None else ():
            value = value[int(part)] if isinstance(value, list) else value[part]
        if value is not None:
            found.append((what, value, unit, name))
    return found
