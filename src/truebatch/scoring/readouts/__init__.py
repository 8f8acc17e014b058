"""What is read from a model: the probabilities of labels, a number of a head, or a text and what it is parsed to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.scoring.backends.interface import SampleError, ScoreResponse
from truebatch.scoring.readouts.label_trie import LabelReading
from truebatch.scoring.readouts.read_answer import CUT_ENDINGS, read_answer
from truebatch.scoring.readouts.scale import Scale

Reduce = Literal["expected", "likeliest"]
Structured = Literal["", "json", "guided_json", "guided_choice"]
_MOST_CHOICES = 1001


@dataclass(frozen=True, slots=True)
class Labels:
    """The probability of each label as the model's next words, and one value made of them; nothing is generated."""

    values: Mapping[str, float]
    """A label -> what it is worth."""
    reduce: Reduce = "expected"
    """The expected value over the labels alone, or the value of the likeliest."""
    prefix: str = ""
    """How the answer begins before the label, such as '{"score": '."""

    def __post_init__(self) -> None:
        if self.reduce not in ("expected", "likeliest"):
            raise ConfigError("an unknown way to reduce", seen=repr(self.reduce), do="expected or likeliest")
        if len(self.values) < 2:
            raise ConfigError("a readout needs at least two labels", seen=f"{list(self.values)}", do="name the others")

    def answer(self, read: LabelReading, tokens: int) -> ScoreResponse | SampleError:
        """The score of one sample, with the probabilities and how much of it all is on the labels."""
        chances = dict(zip(self.values, read.probabilities, strict=True))
        output = {"probabilities": chances, "mass": read.mass}
        if not read.mass > 0:
            return SampleError("model", "no_mass", "the model gives no label any probability", output)
        if self.reduce == "likeliest":
            score = self.values[max(chances, key=lambda label: chances[label])]
        else:
            score = sum(self.values[label] * share for label, share in zip(self.values, read.shares(), strict=True))
        return ScoreResponse(score=float(score), output=output, tokens=tokens)


@dataclass(frozen=True, slots=True)
class YesNo:
    """How much more the model says yes than no: 0 to 1."""

    yes: str = "Yes"
    no: str = "No"
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Words from the best to the worst; the last is worth 1, each before it one more."""

    words: Sequence[str] = ("excellent", "good", "fair", "poor", "bad")
    reduce: Reduce = "expected"
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """A number from a forward pass: the single logit of a reward model, or what `read` makes of the output."""

    read: Callable[[Any], Any] | None = None
    """(the model's output) -> a tensor with one number a row, or several of which the first is the score."""
    name: str = ""
    """Belongs to the fingerprint: another `read` needs another name."""


@dataclass(frozen=True, slots=True)
class Generate:
    """A text for every sample, and what it is parsed to."""

    settings: Generation = field(default_factory=lambda: Generation(temperature=0.0))
    parse: Callable[[str], float | None] | None = None
    """Text -> a number, None or an error where there is none; without it the text is all there is."""
    name: str = ""
    """Belongs to the fingerprint: another `parse` needs another name. Default: the function's own name."""
    scale: Scale | None = None
    """Read the score that the text gives on this scale; see `read_answer`. Instead of `parse`."""
    structured: Structured = ""
    """json: the model can only answer `{"score": N}`, with N on the scale; a server is sent a `response_format`, or as
    `guided_json` or `guided_choice` what older ones take."""
    step: float = 1.0
    """Of the numbers that a structured answer can have."""

    def __post_init__(self) -> None:
        if self.structured not in get_args(Structured):
            raise ConfigError(
                "an unknown way to structure an answer",
                seen=f"structured={self.structured!r}",
                do="use json, or with a server guided_json or guided_choice",
            )
        if self.scale is not None and self.parse is not None:
            raise ConfigError("a text is read in one way", seen="parse and scale", do="leave one of them out")
        if self.structured:
            self.choices()

    def choices(self) -> tuple[str, ...]:
        """The answers that a structured readout allows, as JSON; one for each number of the scale."""
        scale, step = self.scale, self.step
        if scale is None or scale.kind == "pair" or not scale.is_bounded or not step > 0:
            raise ConfigError(
                "a structured answer needs a scale with two ends, and a step above 0",
                seen=f"scale={scale}, step={step!r}",
                do="give --scale 0..10",
            )
        if scale.kind == "yes_no":
            return ('{"score": "yes"}', '{"score": "no"}')
        number = int((scale.most - scale.least) / step + 1e-9) + 1
        if number > _MOST_CHOICES:
            raise ConfigError(
                "a structured answer has too many numbers to choose from", seen=f"{number:,}", do="give a larger --step"
            )
        return tuple(f'{{"score": {round(scale.least + at * step, 9):g}}}' for at in range(number))

    def answer(self, text: str, ended: str, tokens: int) -> ScoreResponse | SampleError:
        """The text, and its score; a text without one is a failure that keeps the text."""
        output = {"text": text, "ended": ended}
        if self.scale is not None:
            return read_score(ScoreResponse(score=None, output=output, tokens=tokens), self.scale)
        if self.parse is None:
            return ScoreResponse(score=None, output=output, tokens=tokens)
        try:
            score = self.parse(text)
        except Exception as error:  # a parser of others may raise anything; the text is kept
            return SampleError("parse", "unparsable", f"{type(error).__name__}: {error}", output)
        if score is None:
            return SampleError("parse", "unparsable", f"no score in {text[:200]!r}", output)
        return ScoreResponse(score=float(score), output=output, tokens=tokens)


Readout = Labels | YesNo | Words | Head | Generate


def as_labels(readout: Readout) -> Labels | None:
    """The labels behind a readout; None where it has none."""
    if isinstance(readout, YesNo):
        return Labels({readout.yes: 1.0, readout.no: 0.0}, prefix=readout.prefix)
    if isinstance(readout, Words):
        number = len(readout.words)
        worth = {word: float(number - at) for at, word in enumerate(readout.words)}
        return Labels(worth, readout.reduce, readout.prefix)
    return readout if isinstance(readout, Labels) else None


def describe_readout(readout: Readout) -> dict[str, Any]:
    """The readout as plain values for a fingerprint."""
    labels = as_labels(readout)
    if labels is not None:
        values = {name: float(value) for name, value in labels.values.items()}
        return {"kind": "labels", "values": values, "reduce": labels.reduce, "prefix": labels.prefix}
    if isinstance(readout, Head):
        return {"kind": "head", "name": readout.name or getattr(readout.read, "__qualname__", "")}
    assert isinstance(readout, Generate)
    name = readout.name or getattr(readout.parse, "__qualname__", "")
    settings = {**asdict(readout.settings), "stop": list(readout.settings.stop)}
    described = {"kind": "generate", "settings": settings, "parse": name}
    if readout.scale is not None:
        described |= {"parse": "number", "scale": describe_scale(readout.scale)}
    return described | ({"structured": readout.structured, "step": readout.step} if readout.structured else {})


def describe_scale(scale: Scale) -> dict[str, Any]:
    """A scale as plain values; ends that are not finite as None."""
    ends = (scale.least, scale.most) if scale.is_bounded else (None, None)
    return {"kind": scale.kind, "least": ends[0], "most": ends[1]}


def read_score(answer: ScoreResponse, scale: Scale) -> ScoreResponse | SampleError:
    """A response with the score that its text gives; without one it is a failure that keeps the text.

    yes is 1, no is 0, and of two numbers the smaller one counts.
    """
    text, ended = str(answer.output["text"]), answer.output.get("ended")
    found = read_answer(text, scale, is_cut=ended in CUT_ENDINGS)
    if found.value is None:
        return SampleError("parse", found.status, f"{found.why}: {text[:200]!r}", dict(answer.output))
    if isinstance(found.value, str):
        score = {"yes": 1.0, "no": 0.0}[found.value]
    else:
        score = min(found.value) if isinstance(found.value, tuple) else found.value
    return ScoreResponse(score=score, output={**answer.output, "value": found.value}, tokens=answer.tokens)
