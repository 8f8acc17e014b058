"""The probability of each of a few answers, read from the model's own next tokens; nothing is generated or parsed.

Labels of several tokens stand in a trie: "1" and "10" begin with the same token, and are told apart one token later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from truebatch.errors import ConfigError
from truebatch.generation.interface import Decoder, Prompt, Session, advance_session, start_session
from truebatch.generation.sampling import check_logits


@dataclass(frozen=True, slots=True)
class Trie:
    """Labels by the tokens they are made of."""

    labels: tuple[str, ...]
    paths: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)
    """For every beginning that goes on: the tokens that may follow it."""
    ends: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """For every whole label: its number."""

    def depth(self) -> int:
        """Forward passes that a readout takes: tokens of the longest label, and no more."""
        return max(len(path) for path in self.paths) + 1


@dataclass(frozen=True, slots=True)
class LabelReading:
    """What the model says of one prompt."""

    probabilities: tuple[float, ...]
    """One a label, as the model has them: their sum is `mass`, not 1."""
    mass: float
    """How much of the probability is on the labels at all; little of it means the question was not understood."""

    def shares(self) -> tuple[float, ...]:
        """The probabilities among the labels alone: their sum is 1."""
        return tuple(p / self.mass for p in self.probabilities)


def build_trie(tokens: Mapping[str, Sequence[int]]) -> Trie:
    """The trie of labels, from the tokens of each. Labels of the same tokens cannot be told apart and are refused."""
    labels = tuple(tokens)
    ends: dict[tuple[int, ...], int] = {}
    follows: dict[tuple[int, ...], set[int]] = {}
    for number, label in enumerate(labels):
        path = tuple(tokens[label])
        if not path or path in ends:
            same = f", the tokens of {labels[ends[path]]!r} too" if path else ""
            raise ConfigError(
                f"the label {label!r} cannot be told from others by this tokenizer",
                seen=f"its tokens are {list(path)}{same}",
                do="choose labels that differ in more than what the tokenizer drops",
            )
        ends[path] = number
        for at in range(len(path)):
            follows.setdefault(path[:at], set()).add(path[at])
    if len(labels) < 2:
        raise ConfigError("a readout needs at least two labels", seen=f"{list(labels)}", do="name the other answers")
    return Trie(labels, {path: frozenset(new) for path, new in follows.items()}, ends)


def read_labels(decoder: Decoder, prompts: Sequence[Prompt], trie: Trie) -> list[LabelReading]:
    """The probability of every label after every prompt; equal to reading each prompt alone.

    A label that is also the beginning of another ("1" of "10") has the probability that it comes and does not go on
    to the other. Beginnings that nobody takes are not followed: a pass holds a row for each that some label needs.
    """
    logits, session = start_session(decoder, prompts)
    found = torch.zeros(len(prompts), len(trie.labels), dtype=torch.float64)
    rows = [(number, ()) for number in range(len(prompts))]
    came = torch.ones(len(prompts), dtype=torch.float64)
    _follow(session, trie, logits, rows, came, found)
    reads = []
    for line in found:
        reads.append(LabelReading(tuple(line.tolist()), float(line.sum())))
    return reads


def read_labels_afresh(
    logits_of: Callable[[Sequence[Prompt]], Tensor], prompts: Sequence[Prompt], trie: Trie
) -> list[LabelReading]:
    """The same without a cache: every beginning of a label is read with its whole prompt, in the shape that it has."""
    found = torch.zeros(len(prompts), len(trie.labels), dtype=torch.float64)
    came: dict[tuple[int, ...], Tensor] = {(): torch.ones(len(prompts), dtype=torch.float64)}
    for path in sorted(trie.paths, key=len):
        logits = logits_of([replace(prompt, ids=(*prompt.ids, *path)) for prompt in prompts])
        check_logits(logits, range(len(prompts)))
        chances = torch.log_softmax(logits.double(), dim=-1).exp().cpu()
        for token in sorted(trie.paths[path]):
            onward, chance = (*path, token), came[path] * chances[:, token]
            if onward in trie.paths:
                came[onward] = chance
            else:
                found[:, trie.ends[onward]] = chance
        if path in trie.ends:
            going = chances[:, sorted(trie.paths[path])].sum(dim=1)
            found[:, trie.ends[path]] = came[path] * (1 - going).clamp(min=0)
    return [LabelReading(tuple(line.tolist()), float(line.sum())) for line in found]


def _follow(
    session: Session,
    trie: Trie,
    logits: Tensor,
    rows: Sequence[tuple[int, tuple[int, ...]]],
    came: Tensor,
    found: Tensor,
) -> None:
    """Share out the probability `came` with which each row's beginning comes, level by level."""
    while True:
        check_logits(logits, [number for number, _ in rows])
        chances = torch.log_softmax(logits.double(), dim=-1).exp().cpu()
        onward: list[tuple[int, int, tuple[int, ...], float]] = []
        for at, (number, path) in enumerate(rows):
            going = 0.0
            for token in sorted(trie.paths[path]):
                chance = float(chances[at, token])
                going += chance
                _arrive(trie, at, number, (*path, token), float(came[at]) * chance, found, onward)
            if path in trie.ends:
                found[number, trie.ends[path]] = float(came[at]) * max(0.0, 1.0 - going)
        if not onward:
            return
        logits = advance_session(session, [at for at, *_ in onward], [path[-1] for _, _, path, _ in onward], logits)
        rows = [(number, path) for _, number, path, _ in onward]
        came = torch.tensor([chance for *_, chance in onward], dtype=torch.float64)


def _arrive(
    trie: Trie, at: int, number: int, path: tuple[int, ...], chance: float, found: Tensor,
    onward: list[tuple[int, int, tuple[int, ...], float]],
) -> None:  # fmt: skip
    if path in trie.paths:
        onward.append((at, number, path, chance))
    else:
        found[number, trie.ends[path]] = chance
