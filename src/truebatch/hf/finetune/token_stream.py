"""A data file or a dataset of the Hub as a stream of encoded samples: nothing is held, and it resumes by its number.

records -> token ids and labels, one at a time -> refused, dropped or cut -> what the head needs beside
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.tokenize import FileTokenizer, encode_record
from truebatch.hf.heads.heads import ModelHead
from truebatch.hf.hub import is_hub_name, stream_dataset
from truebatch.io.data_files import read_samples


class TokenStream:
    """Samples of a file in its order, encoded as they are read; begins anew each time it is iterated."""

    label_names: tuple[str, ...] = ()

    def __init__(self, encoder: FileTokenizer, path: Path) -> None:
        if encoder.task.endswith("classification"):
            raise ConfigError(
                "the classes are known once all samples are read, so a classifier cannot be trained on a stream",
                seen=f"task={encoder.task}, streaming=true",
                do="leave streaming out: encoded samples are kept in small arrays",
            )
        self._encoder, self._path = encoder, path
        self._at = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the start of a run."""
        return (f"{self._path}: read as a stream",)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        records = stream_dataset(self._path) if is_hub_name(self._path) else read_samples(self._path)
        for place, record in islice(records, self._at, None):
            self._at += 1
            sample = encode_record(self._encoder, record, place)
            if sample is not None:
                yield dict(sample)
        self._at = 0

    def first(self) -> dict[str, Any]:
        """The first sample, which tells what a head needs."""
        for sample in TokenStream(self._encoder, self._path):
            return sample
        raise DataError(
            f"{self._path} holds no samples", seen="nothing to train on", do="check that it is the right file"
        )

    def state_dict(self) -> dict[str, Any]:
        """How many records were read."""
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many records; they are passed over without being encoded."""
        self._at = int(state["at"])


@dataclass(frozen=True, slots=True, eq=False)
class HeadStream:
    """Encoded samples of a stream with what the head needs beside."""

    encoded: TokenStream
    head: ModelHead

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.head.prepare, self.encoded)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        return self.encoded.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.encoded.load_state_dict(state)
