"""Fuzzing: any bytes are a value or a three-part refusal. Inputs that ever failed are kept in the corpus and stay there."""

from __future__ import annotations

import hashlib
import random
import signal
from pathlib import Path

import pytest

from tests.fuzz.parsers import CORPUS, FUZZED, Fuzzed
from truebatch.errors import TruebatchError

FEW, MANY = 300, 20_000
SECONDS = 20
"""An input that takes longer hangs."""


def seeds(parser: Fuzzed) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / parser.name).iterdir())]


def mutate(draw: random.Random, kept: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A kept input with a few bytes, words and pieces of other inputs put in, taken out, doubled or moved."""
    data = bytearray(draw.choice(kept))
    for _ in range(draw.randint(1, 6)):
        at, end = sorted(draw.randint(0, len(data)) for _ in range(2))
        other = draw.choice(kept)
        begin = draw.randint(0, len(other))
        piece = draw.choice(
            [
                draw.choice(words),
                draw.randbytes(draw.randint(1, 4)),
                bytes(data[at:end]) * 2,
                other[begin : begin + 40],
                b"",
            ]
        )
        data[at : min(end, at + draw.choice((0, 0, 1, 4, 60)))] = piece
        del data[20_000:]
    return bytes(data)


def wrong(parser: Fuzzed, data: bytes) -> str:
    """What a parser does beside giving a value or refusing in three parts; empty if nothing."""
    try:
        parser.call(data)
    except TruebatchError as error:
        return "" if error.wrong and error.seen and error.do else f"a part is missing: {error!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def keep(parser: Fuzzed, data: bytes) -> Path:
    path = CORPUS / parser.name / f"failed-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
    path.write_bytes(data)
    return path


def fuzz(parser: Fuzzed, number: int, seed: int) -> None:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    draw, kept = random.Random(seed), seeds(parser)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(number):
            data = mutate(draw, kept, parser.words)
            signal.alarm(SECONDS)
            found = wrong(parser, data)
            signal.alarm(0)
            assert not found, f"{found}; kept as {keep(parser, data)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("parser", FUZZED, ids=lambda parser: parser.name)
def test_every_kept_input_is_read_or_refused(parser):
    assert not [(data[:60], found) for data in seeds(parser) if (found := wrong(parser, data))]


@pytest.mark.parametrize("parser", FUZZED, ids=lambda parser: parser.name)
def test_any_bytes_are_read_or_refused(parser):
    fuzz(parser, FEW, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parser", FUZZED, ids=lambda parser: parser.name)
def test_many_more_bytes_are_read_or_refused(parser):
    fuzz(parser, MANY, seed=2)


def test_seeds_reach_beyond_the_first_check():
    """Every parser has a kept input that it reads to the end: mutations begin where things are right."""
    assert not [parser.name for parser in FUZZED if all(_is_refused(parser, data) for data in seeds(parser))]


def _is_refused(parser: Fuzzed, data: bytes) -> bool:
    try:
        parser.call(data)
    except TruebatchError:
        return True
    return False
