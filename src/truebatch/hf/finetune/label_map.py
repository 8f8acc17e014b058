"""Names of classes and their numbers: from the data, or from the model where it knows them all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from truebatch.errors import DataError
from truebatch.io.text_encoding import nearest

MOST_CLASSES = 1 << 20
"""Every class gets a row of weights, also those nobody has: a larger number is something else, such as an id."""
_UNNAMED = re.compile(r"LABEL_\d+")


def label_names(found: Sequence[str | int], known: Mapping[int, str], *, name: str) -> tuple[str, ...]:
    """The classes in the order of their numbers.

    Numbers are numbers. Texts get the model's numbers where it has names for all of them, else alphabetical ones.
    """
    if all(isinstance(label, int) for label in found):
        _refuse_identifiers(found, name)
        names = tuple(str(number) for number in range(max(map(int, found), default=0) + 1))
        named = [known[number] for number in sorted(known)]
        names = tuple(named) if len(named) >= len(names) and not _is_unnamed(named) else names
    elif all(isinstance(label, str) for label in found):
        texts = {str(label) for label in found}
        named = [known[number] for number in sorted(known)]
        names = tuple(named) if texts <= set(named) else tuple(sorted(texts))
    else:
        numbers = sorted({label for label in found if isinstance(label, int)})
        raise DataError(
            f"{name} mixes labels that are texts with labels that are numbers",
            seen=f"numbers {numbers[:4]}, texts {sorted({x for x in found if isinstance(x, str)})[:4]}",
            do="write them all in one way",
        )
    if len(names) < 2:
        raise DataError(
            f"{name} has one label only: there is nothing to tell apart",
            seen=f"labels {list(names)}",
            do="check the field `label`",
        )
    return names


def _refuse_identifiers(found: Sequence[str | int], name: str) -> None:
    largest = max(map(int, found), default=0)
    if largest >= MOST_CLASSES:
        raise DataError(
            f"{name} has a label that is too large to be the number of a class",
            seen=f"label {largest:,}; classes are numbered from 0 to {MOST_CLASSES - 1:,} at most",
            do="number the classes from 0, or write their names as texts",
        )


def _is_unnamed(names: Sequence[str]) -> bool:
    return all(_UNNAMED.fullmatch(name) for name in names)


def number_of(label: str | int, names: Sequence[str], place: str) -> int:
    """The number of a class; one that is not in the training data raises `DataError` with the nearest name."""
    if isinstance(label, int) and label < len(names):
        return label
    if label in names:
        return list(names).index(str(label))
    raise DataError(
        f"{place} has an unknown label{nearest(str(label), list(names))}",
        seen=f"label {label!r}; known: {', '.join(names[:12])}",
        do="correct it, or add samples of that class to the training data",
    )


def describe_labels(numbers: Iterable[int], names: Sequence[str]) -> str:
    """How often each class occurs, in one line."""
    counts: Counter[Any] = Counter(numbers)
    shown = [f"{name} {counts.get(at, 0):,}" for at, name in enumerate(names[:12])]
    return "labels: " + ", ".join(shown) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
