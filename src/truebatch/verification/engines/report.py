"""What comparing two engines found, for a person and for a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from truebatch.html_repr import html_lines, html_table
from truebatch.language.columns import align
from truebatch.verification.engines.first_divergence import Divergence

Verdict = Literal["equal", "different", "unproven"]


@dataclass(frozen=True, slots=True)
class Level:
    """How far the outputs are apart in one precision, and how far rounding alone moves them."""

    name: str
    value: float
    """Largest difference, relative to the largest output; for a server, of a log-probability."""
    floors: tuple[float, ...]
    """The same for each of several rounded runs."""
    limit: float
    sample: int
    """Where the difference is largest."""

    @property
    def floor(self) -> float:
        """The furthest that rounding alone went."""
        return max(self.floors, default=0.0)

    @property
    def is_over(self) -> bool:
        """True if rounding does not explain it; NaN counts."""
        return not self.value <= self.limit

    def __str__(self) -> str:
        gap, floor, limit = map(_number, (self.value, self.floor, self.limit))
        return f"{self.name} differ by {gap}; rounding alone {floor}, allowed {limit}"


@dataclass(frozen=True, slots=True)
class SampleGap:
    """How far apart two engines are on one sample's own tokens."""

    sample: int
    tokens: int
    """That have a log-probability: all but the first."""
    max_gap: float
    """Largest |difference of log-probabilities|."""
    mean_gap: float
    max_ratio: float
    """Largest importance ratio of a token, either way: e to the largest difference."""
    k3: float
    """Mean of r - 1 - log r with r = p(model) / p(other): the usual estimate of KL from the tokens at hand."""
    kl: float | None = None
    """Mean KL(model || other) over whole vocabularies; None where only tokens' own log-probabilities are known."""


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """The first token at which a server and a model part."""

    sample: int
    position: int
    token: int
    text: str
    here: float
    """Log-probability by the model."""
    there: float

    def __str__(self) -> str:
        token = f"{self.token} {self.text!r}" if self.text else str(self.token)
        place = f"token {token} at position {self.position} of sample {self.sample}"
        if math.isnan(self.here):
            return f"{place}: only the server reads it"
        return f"{place}: log-probability {self.here:.6f} by the model, {self.there:.6f} by the other"


@dataclass(frozen=True, slots=True, eq=False)
class AgainstReport:
    """Two engines on the same samples. `ok` is True only if they differ by nothing but rounding."""

    against: str
    """The other engine, in words."""
    levels: Sequence[Level]
    samples: Sequence[SampleGap] = ()
    first_module: Divergence | None = None
    first_token: TokenDivergence | None = None
    reasons: Sequence[str] = ()
    """What differs beside the numbers: tokens, tokenizers."""
    unproven: str = ""
    """Why it cannot be judged, if so; an empty string otherwise."""
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """equal, different or unproven."""
        if self.unproven:
            return "unproven"
        return "different" if self.reasons or any(level.is_over for level in self.levels) else "equal"

    @property
    def ok(self) -> bool:
        """True if the two differ only by rounding."""
        return self.verdict == "equal"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "unproven": self.unproven,
            "against": self.against,
            "levels": [{**asdict(level), "floor": level.floor} for level in map(_finite, self.levels)],
            "samples": [asdict(one) for one in self.samples],
            "first_module": None if self.first_module is None else asdict(_finite(self.first_module)),
            "first_token": None if self.first_token is None else _token_dict(self.first_token),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [_headline(self), *(f"  {level}" for level in self.levels), *_sample_lines(self.samples)]
        return "\n".join([*lines, *_words(self)])

    def _repr_html_(self) -> str:
        rows = [_cells(one) for one in self.samples]
        words = [*map(str, self.levels), *_words(self)]
        return html_table(rows, header=_HEADER, title=_headline(self)) + html_lines(words)


def sample_gap(sample: int, here: Tensor, there: Tensor, kl: float | None = None) -> SampleGap:
    """The figures of one sample, from two rows of log-probabilities."""
    gap = here.double() - there.double()
    size, ratio = gap.abs(), torch.exp(gap)
    return SampleGap(
        sample,
        len(gap),
        float(size.max()),
        float(size.mean()),
        math.exp(min(float(size.max()), 700.0)),
        float((ratio - 1 - gap).mean()),
        kl,
    )


_HEADER = ("sample", "tokens", "max |Δ log p|", "mean |Δ log p|", "max ratio", "k3", "KL")


def _cells(one: SampleGap) -> tuple[str, ...]:
    numbers = (one.max_gap, one.mean_gap, one.max_ratio - 1, one.k3)
    gaps = [f"{number:.1e}" for number in numbers]
    gaps[2] = f"1 + {gaps[2]}"
    return (str(one.sample), str(one.tokens), *gaps, "" if one.kl is None else f"{one.kl:.1e}")


def _sample_lines(samples: Sequence[SampleGap]) -> list[str]:
    lines = align([_HEADER, *map(_cells, samples)]) if samples else []
    return [f"  {line}" for line in lines]


def _headline(report: AgainstReport) -> str:
    if report.unproven:
        return f"UNPROVEN: {report.unproven}"
    if report.ok:
        return f"EQUAL: {report.against} gives what the model gives, apart from rounding"
    return f"DIFFERENT: {report.against} gives something else, by more than rounding"


def _words(report: AgainstReport) -> list[str]:
    out = [f"first difference: {report.first_module}"] if report.first_module is not None else []
    out += [f"first difference: {report.first_token}"] if report.first_token is not None else []
    return out + [f"differs: {reason}" for reason in report.reasons] + [f"note: {note}" for note in report.notes]


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "not comparable" if math.isinf(value) else f"{value:.1e}"


def _token_dict(one: TokenDivergence) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in asdict(one).items()}


def _finite(one: Any) -> Any:
    """JSON has no infinity and no NaN: they become the largest number."""
    return one if math.isfinite(one.value) else replace(one, value=torch.finfo(torch.float64).max)
