"""What `verify` found, for a person and for a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from truebatch.html_repr import html_lines, html_table
from truebatch.language.columns import align
from truebatch.verification.arrangements import LAYOUTS, Arrangement
from truebatch.verification.compare import Difference, Whole
from truebatch.verification.diagnosis.first_difference import ModuleDifference
from truebatch.verification.diagnosis.probes import Leak

_SEVERITY = ("equal", "refused", "different")
Verdict = Literal["equal", "different", "raised", "note"]


@dataclass(frozen=True, slots=True, eq=False)
class ArrangementResult:
    """One arrangement and how it compares with one by one."""

    arrangement: Arrangement
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    moved: frozenset[int] = frozenset()
    """Samples whose outputs differ."""
    error: str = ""
    """What the model raised in this arrangement."""
    whole: Whole | None = None

    @property
    def name(self) -> str:
        """The name of the arrangement."""
        return self.arrangement.name

    @property
    def has_outputs(self) -> bool:
        """False for a model that gives nothing but a loss."""
        return any(d.part == "outputs" for d in self.differences)

    def is_over(self, part: str) -> bool:
        """True if outputs, loss or gradient differ by more than allowed."""
        return any(d.is_over for d in self.differences if d.part == part)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a micro-batch gives something else, in plain words, and what to do about it."""

    name: str
    words: str
    fix: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was looked at, so that nobody takes the proof for more than it is."""

    modes: tuple[str, ...] = ()
    """In which modes of the model; empty where there is no model that has modes."""
    longest: int = 0
    """Cells of the longest sample."""
    shortest: int = 0
    rows: int = 0
    """Rows of the largest micro-batch."""
    gradient: bool = False
    """True if gradients were compared."""
    unseen: tuple[str, ...] = ()
    """Modules whose outputs could not be taken apart by sample."""

    def __str__(self) -> str:
        parts = [_MODES[self.modes], _GRADIENTS[self.gradient]]
        parts.append(f"samples of {self.shortest} to {self.longest} cells, up to {self.rows} rows")
        if self.unseen:
            more = f" and {len(self.unseen) - 3} more" if len(self.unseen) > 3 else ""
            parts.append(f"modules that could not be compared: {', '.join(self.unseen[:3])}{more}")
        return "; ".join(parts)


_MODES = {
    (): "no modes (no model was found)",
    ("train",): "training mode only",
    ("eval",): "eval mode only",
    ("train", "eval"): "training and eval mode",
}
_GRADIENTS = {True: "gradients too", False: "no gradients"}


@dataclass(frozen=True, slots=True, eq=False)
class VerifyReport:
    """The proof, or where it fails. `ok` is True only if every required arrangement equals one by one."""

    results: Sequence[ArrangementResult]
    causes: Sequence[Cause] = ()
    first_module: ModuleDifference | None = None
    leaks: Sequence[Leak] = ()
    notes: Sequence[str] = ()
    unproven: str = ""
    """Why nothing could be proven, if so; an empty string otherwise."""
    mode: str = "eval"
    leak_visible: float = 0.0
    """How far a changed sample moves itself, relative; a leak of that size would have been seen."""
    limits: dict[str, float] = field(default_factory=dict)
    used: tuple[str, ...] = LAYOUTS
    """The layouts whose verdict counts."""
    coverage: Coverage = Coverage()
    exactness: Literal["rounding", "bits"] = "rounding"
    """Whether arrangements were compared up to rounding with one by one, or bit for bit with the same step."""

    @property
    def broken(self) -> list[ArrangementResult]:
        """The arrangements that break the law in the layouts that count: different, or right padded and raising."""
        return [
            r
            for r in self.results
            if r.arrangement.layout in self.used and (r.verdict == "different" or _is_needed_and_raised(r))
        ]

    @property
    def layouts(self) -> dict[str, str]:
        """Layout -> equal, different or refused, for each that was run."""
        found: dict[str, str] = {}
        for r in self.results:
            worst = "refused" if r.verdict == "raised" else "different" if r.verdict == "different" else "equal"
            earlier = found.get(r.arrangement.layout, "equal")
            found[r.arrangement.layout] = max(earlier, worst, key=_SEVERITY.index)
        return found

    @property
    def refused(self) -> list[ArrangementResult]:
        """The layouts the model refuses by raising: not usable, but never silently wrong."""
        return [r for r in self.results if r.verdict == "raised" and not _is_needed_and_raised(r)]

    @property
    def is_broken(self) -> bool:
        """True if a sample's result depends on what else is in its micro-batch."""
        return bool(self.broken or self.leaks or self.causes)

    @property
    def ok(self) -> bool:
        """True if the law was proven to hold in every arrangement that ran."""
        return not self.is_broken and not self.unproven

    @property
    def verdict(self) -> str:
        """equal, broken or unproven."""
        return "broken" if self.is_broken else "unproven" if self.unproven else "equal"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "unproven": self.unproven,
            "exactness": self.exactness,
            "mode": self.mode,
            "layouts": self.layouts,
            "used": list(self.used),
            "coverage": _coverage_dict(self.coverage),
            "limits": dict(self.limits),
            "arrangements": [_result_dict(r) for r in self.results],
            "causes": [{"name": c.name, "words": c.words, "fix": c.fix} for c in self.causes],
            "first_module": None if self.first_module is None else _module_dict(self.first_module),
            "leaks": [{"arrangement": x.arrangement, "changed": x.changed, "moved": x.moved} for x in self.leaks],
            "leak_visible": self.leak_visible,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, words: Callable[[str], str] = str) -> str:
        """The report for a terminal; `words` translates each line and each cell before they are aligned."""
        rows = [(marked, words(name), words(found)) for marked, name, found in _rows(self)]
        table = [f"  {line}" for line in align(rows, others="left")]
        return "\n".join([words(_headline(self)), *table, *map(words, _remarks(self))])

    def _repr_html_(self) -> str:
        header = ("", "arrangement", "differences")
        return html_table(_rows(self), header=header, title=_headline(self)) + html_lines(_remarks(self))


def _rows(report: VerifyReport) -> list[tuple[str, str, str]]:
    return [(mark(r), _NAMES.get(r.name, r.name), describe(r)) for r in report.results]


def _remarks(report: VerifyReport) -> list[str]:
    """The lines under the table."""
    covered = [f"covered: {report.coverage}"] if report.results else []
    found = [*_layout_words(report), *_module_words(report), *_leak_words(report), *_cause_words(report)]
    return [*found, *covered, *(f"note: {note}" for note in report.notes)]


def _coverage_dict(coverage: Coverage) -> dict[str, Any]:
    values = asdict(coverage)
    return {**values, "modes": list(coverage.modes), "unseen": list(coverage.unseen)}


def _layout_words(report: VerifyReport) -> list[str]:
    """A line on layouts that do not count and are not right; those that count have a verdict already."""
    wrong = [name for name, verdict in report.layouts.items() if verdict == "different" and name not in report.used]
    return [f"not right, and not in use: {_LAYOUT_NAMES[name]} (--layout {name} makes it count)" for name in wrong]


_LAYOUT_NAMES = {"right": "right padding", "left": "left padding", "packed": "packed rows"}
_NAMES = {"packed": "packed rows", "permuted": "rows in another order"}
"""Of arrangements, where they are shown and one word would look like a value to type."""


def _module_words(report: VerifyReport) -> list[str]:
    return [] if report.first_module is None else [f"first difference: {report.first_module}"]


def _leak_words(report: VerifyReport) -> list[str]:
    return [
        f"leak: {_NAMES.get(x.arrangement, x.arrangement)}: changing sample {x.changed} moves sample {x.moved}"
        for x in report.leaks[:3]
    ]


def _cause_words(report: VerifyReport) -> list[str]:
    return [line for cause in report.causes for line in (f"likely cause: {cause.words}", f"  do: {cause.fix}")]


def _headline(report: VerifyReport) -> str:
    if report.exactness == "bits":
        return _bits_headline(report)
    if report.broken:
        return f"BROKEN: a sample's result depends on its micro-batch ({len(report.broken)} arrangements differ)"
    if report.is_broken:
        return "BROKEN: the law does not hold, although no arrangement differs; the causes say why"
    if report.unproven:
        return f"UNPROVEN: {report.unproven}"
    ran = sum(r.verdict in ("equal", "note") for r in report.results)
    if report.refused:
        return f"EQUAL: every sample gets what it gets alone, in {ran} arrangements; {len(report.refused)} more are refused"
    return f"EQUAL: every sample gets what it gets alone, in {ran} arrangements"


def _bits_headline(report: VerifyReport) -> str:
    if report.broken:
        return f"BROKEN: {len(report.broken)} cuts of a step change bits of its loss or gradient, or raise"
    if report.unproven:
        return f"UNPROVEN: {report.unproven}"
    ran = sum(r.verdict == "equal" for r in report.results)
    refused = f"; {len(report.refused)} layout(s) are refused" if report.refused else ""
    return f"EQUAL TO THE LAST BIT: loss and gradients of a step, under {ran} cuts{refused}"


def mark(result: ArrangementResult) -> str:
    """A short mark for a table."""
    return {"equal": "=", "different": "x", "raised": "!", "note": "~"}[result.verdict]


_SAID = {
    ("outputs", False): "outputs {number}",
    ("outputs", True): "outputs {number} in {where}",
    ("loss", False): "loss {number}",
    ("loss", True): "loss {number} in {where}",
    ("gradient", False): "gradient {number}",
    ("gradient", True): "gradient {number} in {where}",
}
"""A part, and whether it is over its limit."""


def describe(result: ArrangementResult) -> str:
    """One line on a result: how far, where, or what was raised."""
    if result.verdict == "raised" or result.error:
        return f"raised {result.error.splitlines()[0][:90] if result.error else ''}"
    over = [d for d in result.differences if d.is_over]
    shown = over or result.differences
    texts = [_SAID[d.part, d.is_over].format(number=_number(d.value), where=d.where) for d in shown]
    return "; ".join(texts)


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "not equal" if math.isinf(value) else f"{value:.1e}"


def _is_needed_and_raised(result: ArrangementResult) -> bool:
    return result.verdict == "raised" and result.arrangement.layout == "right"


def _result_dict(result: ArrangementResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "layout": result.arrangement.layout,
        "verdict": result.verdict,
        "error": result.error,
        "moved_samples": sorted(result.moved),
        "differences": [
            {"part": d.part, "value": d.value if math.isfinite(d.value) else str(d.value), "limit": d.limit, "where": d.where}
            for d in result.differences
        ],
    }  # fmt: skip


def _module_dict(module: ModuleDifference) -> dict[str, Any]:
    return {"name": module.name, "kind": module.kind, "sample": module.sample, "value": module.value}
