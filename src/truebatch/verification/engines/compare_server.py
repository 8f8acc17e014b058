"""A model against a server that holds it: the log-probabilities of the same tokens, and the first that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.errors import ConfigError
from truebatch.verification.determinism import quieted
from truebatch.verification.engines.compare_models import run
from truebatch.verification.engines.counterpart import DTYPES, WIDE, Counterpart
from truebatch.verification.engines.first_divergence import ROOM, SEEDS
from truebatch.verification.engines.report import AgainstReport, Level, TokenDivergence, sample_gap
from truebatch.verification.engines.rounding_noise import Rounding
from truebatch.verification.engines.server_logprobs import PromptLogprobs, Server, prompt_logprobs

Rows = list[Tensor]
"""Of every sample, the log-probability of each token after the first."""


def compare_with_server(
    here: Counterpart, server: Server, texts: Sequence[tuple[str, list[int]]] = ()
) -> AgainstReport:
    """Ask the server for the tokens of every sample, and judge what lies between it and the model.

    `texts` are sent as they are, each with the ids that the model's own tokenizer makes of it.
    """
    ids = _token_ids(here)
    dtype = _dtype(server, here)
    said = prompt_logprobs(server, [*ids, *(text for text, _ in texts)])
    with quieted(here.model, "eval"):
        return _judged(_Asked(here, server, ids, dtype), said[: len(ids)], _tokenizer_reasons(texts, said[len(ids) :]))


@dataclass(frozen=True, slots=True)
class _Asked:
    here: Counterpart
    server: Server
    ids: list[list[int]]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"the server at {self.server.address}"


def _judged(asked: _Asked, said: Sequence[PromptLogprobs], reasons: list[str]) -> AgainstReport:
    own = _rows(run(asked.here), asked.ids)
    wrong = [(at, _token_fault(one, ids)) for at, (one, ids) in enumerate(zip(said, asked.ids, strict=True))]
    faults = [f"sample {at}: {fault}" for at, fault in wrong if fault]
    if faults:
        first = next(at for at, fault in wrong if fault)
        parting = _first_read(first, said[first], asked.ids[first])
        return AgainstReport(asked.name, [], first_token=parting, reasons=[*reasons, *faults[:3]])
    lacking = next((at for at, one in enumerate(said) if any(v is None for v in one.logprobs[1:])), None)
    if lacking is not None:
        why = f"the server leaves log-probabilities of sample {lacking} out"
        return AgainstReport(asked.name, [], unproven=why, reasons=reasons)
    theirs = [torch.tensor([v or 0.0 for v in one.logprobs[1:]], dtype=torch.float64) for one in said]
    level = _level(asked, own, theirs, _resolution(said))
    return AgainstReport(
        asked.name,
        [level],
        [sample_gap(at, a, b) for at, (a, b) in enumerate(zip(own, theirs, strict=True)) if len(a)],
        first_token=_first_over(own, theirs, level.limit, asked.ids, said),
        reasons=reasons,
        unproven="" if reasons else _unsure_of_dtype(asked, own, level),
    )


def _level(asked: _Asked, own: Rows, theirs: Rows, resolution: float) -> Level:
    floors = _floors(asked, own, asked.dtype)
    gaps = [_largest(a, b) for a, b in zip(own, theirs, strict=True)]
    sample = max(range(len(gaps)), key=lambda at: gaps[at])
    word = str(asked.dtype).removeprefix("torch.")
    floor = max(floors, default=0.0)
    return Level(f"log-probabilities in {word}", gaps[sample], tuple(floors), ROOM * floor + resolution, sample)


def _floors(asked: _Asked, own: Rows, dtype: torch.dtype) -> list[float]:
    """The largest change of any token's log-probability in each of several rounded runs of the model."""
    here = asked.here
    wide = WIDE if torch.finfo(here.dtype).bits < 32 else None
    is_narrower = torch.finfo(dtype).bits < torch.finfo(here.dtype).bits
    names = frozenset(name for name, _ in here.model.named_parameters()) if is_narrower else frozenset()
    exact = own if wide is None else _rows(run(here, wide), asked.ids)
    rounding = Rounding(dtype, names, dtype)
    runs = [_rows(run(here, wide, rounding, seed), asked.ids) for seed in SEEDS]
    floors = [max(map(_largest, one, exact), default=0.0) for one in runs]
    return floors if wide is None else [*floors, max(map(_largest, own, exact), default=0.0)]


def _unsure_of_dtype(asked: _Asked, own: Rows, level: Level) -> str:
    """Where the server may well run in half precision, which nobody said, and that would explain it."""
    if not level.is_over or asked.server.dtype is not None or torch.finfo(asked.dtype).bits < 32:
        return ""
    half = ROOM * max(_floors(asked, own, torch.bfloat16), default=0.0)
    if not level.value <= half:
        return ""
    return (
        f"log-probabilities differ by {level.value:.1e}, more than rounding to {str(asked.dtype).removeprefix('torch.')} "
        "and no more than rounding to bfloat16: say what the server computes in, with --served-dtype"
    )


def _first_over(
    own: Rows, theirs: Rows, limit: float, ids: Sequence[Sequence[int]], said: Sequence[PromptLogprobs]
) -> TokenDivergence | None:
    for at, (a, b) in enumerate(zip(own, theirs, strict=True)):
        over = ~((a - b).abs() <= limit)
        if bool(over.any()):
            place = int(over.nonzero()[0]) + 1
            text = said[at].texts[place]
            return TokenDivergence(at, place, ids[at][place], text, float(a[place - 1]), float(b[place - 1]))
    return None


def _token_fault(one: PromptLogprobs, ids: Sequence[int]) -> str:
    """What is wrong with the tokens that the server read, if anything."""
    read = len(one.logprobs)
    if read != len(ids):
        return f"the server reads {read} tokens where {len(ids)} were sent"
    other = next(((at, a, b) for at, (a, b) in enumerate(zip(one.ids, ids, strict=True)) if a not in (None, b)), None)
    return f"the server reads token {other[1]} at position {other[0]} where {other[2]} was sent" if other else ""


def _first_read(at: int, one: PromptLogprobs, ids: Sequence[int]) -> TokenDivergence | None:
    """The first token that the server read otherwise, where it says which."""
    pairs = list(zip(one.ids, one.texts, one.logprobs, strict=True))
    for place, (token, text, value) in enumerate(pairs):
        if token is not None and (place >= len(ids) or token != ids[place]):
            return TokenDivergence(at, place, token, text, math.nan, math.nan if value is None else value)
    return None


def _tokenizer_reasons(texts: Sequence[tuple[str, list[int]]], said: Sequence[PromptLogprobs]) -> list[str]:
    for (text, ids), one in zip(texts, said, strict=True):
        if _token_fault(one, ids):
            read = len(one.logprobs)
            return [f"the tokenizers: of {text!r} the server makes {read} tokens, the model's own {len(ids)}"]
    return []


def _rows(outputs: dict[tuple[str, int], Tensor], ids: Sequence[Sequence[int]]) -> Rows:
    rows = []
    for at, tokens in enumerate(ids):
        logits = outputs["logits", at][:-1].double()
        chosen = torch.tensor(list(tokens[1:]), dtype=torch.long)[:, None]
        rows.append(torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1))
    return rows


def _largest(a: Tensor, b: Tensor) -> float:
    gap = float((a - b).abs().max()) if len(a) else 0.0
    return math.inf if math.isnan(gap) else gap


def _resolution(said: Sequence[PromptLogprobs]) -> float:
    """Half of the last decimal that the server writes: some write few."""
    places = [len(repr(v).partition(".")[2]) for one in said for v in one.logprobs if v and "e" not in repr(v)]
    return 0.5 * 10.0 ** -max(places) if places else 0.0


def _token_ids(here: Counterpart) -> list[list[int]]:
    extra = {field.key for field in here.subject.fields} - {"input_ids", "labels"}
    if not here.subject.causal or extra or not all("input_ids" in sample for sample in here.subject.samples):
        raise ConfigError(
            "only a causal language model of plain text is compared with a server",
            seen=f"{type(here.model).__name__} with fields {', '.join(f.key for f in here.subject.fields)}",
            do="compare a model whose samples are token ids, or another folder of it",
        )
    ids = [torch.as_tensor(sample["input_ids"]).tolist() for sample in here.subject.samples]
    if not any(len(one) > 1 for one in ids):
        raise ConfigError(
            "no sample has a token with something before it", seen="samples of one token", do="give longer samples"
        )
    return ids


def _dtype(server: Server, here: Counterpart) -> torch.dtype:
    if server.dtype is None:
        return here.dtype
    if server.dtype not in DTYPES:
        raise ConfigError("an unknown dtype of a server", seen=server.dtype, do=f"give one of {', '.join(DTYPES)}")
    return max((DTYPES[server.dtype], here.dtype), key=lambda dtype: torch.finfo(dtype).eps)
