"""Which operation of a micro-batch is which of the sample alone: the two may take turns, loops and other paths."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from truebatch.verification.diagnosis.trace.op_trace import Operation, Recorded, operation_key
from truebatch.verification.diagnosis.trace.sample_parts import SamplePlace


def align_operations(
    alone: Sequence[Recorded], together: Sequence[Operation], place: SamplePlace
) -> dict[int, Recorded]:
    """Number of an operation of the micro-batch -> the same operation of the sample alone.

    What runs once for every sample is met where it runs for this one.
    """
    own = {r.operation for r in alone}
    first = _first_calls({o.module: max(o.call, 0) for o in own}, together, place)
    groups: dict[tuple[str, int], tuple[list[Recorded], list[int]]] = defaultdict(lambda: ([], []))
    for one in alone:
        groups[one.operation.module, one.operation.call][0].append(one)
    for number, operation in enumerate(together):
        groups[operation.module, operation.call - first.get(operation.module, 0)][1].append(number)
    found: dict[int, Recorded] = {}
    for singles, numbers in groups.values():
        singles, numbers = _without_turns(singles, numbers, together, place, found)
        a, b = [operation_key(s.operation) for s in singles], [operation_key(together[n]) for n in numbers]
        for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            found |= {numbers[block.b + k]: singles[block.a + k] for k in range(block.size)}
    return found


def _first_calls(alone: Mapping[str, int], together: Sequence[Operation], place: SamplePlace) -> dict[str, int]:
    """Of modules that are called once for every sample: the first of the calls that are this sample's."""
    calls: Counter[str] = Counter()
    for operation in together:
        calls[operation.module] = max(calls[operation.module], operation.call + 1)
    return {
        name: place.at * (most + 1)
        for name, most in alone.items()
        if place.samples > 1 and calls[name] == place.samples * (most + 1) and name
    }


def _without_turns(
    singles: list[Recorded], numbers: list[int], together: Sequence[Operation], place: SamplePlace,
    found: dict[int, Recorded],
) -> tuple[list[Recorded], list[int]]:  # fmt: skip
    """Lines that run as many times for every sample are met by turns, and left out of what is returned."""
    ones: dict[tuple[str, str, str], list[Recorded]] = defaultdict(list)
    many: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for single in singles:
        ones[operation_key(single.operation)].append(single)
    for number in numbers:
        many[operation_key(together[number])].append(number)
    turned = {k for k, some in ones.items() if place.samples > 1 and len(many[k]) == place.samples * len(some)}
    for key in turned:
        own = many[key][place.at * len(ones[key]) :]
        found.update(zip(own, ones[key], strict=False))
    return (
        [s for s in singles if operation_key(s.operation) not in turned],
        [n for n in numbers if operation_key(together[n]) not in turned],
    )


def loops_along(alone: Sequence[Recorded], together: Sequence[Operation], place: SamplePlace) -> frozenset[Operation]:
    """Operations of lines that run as many times as a row has cells."""
    ones = Counter((r.operation.module, r.operation.source, r.operation.name) for r in alone)
    many = Counter((o.module, o.source, o.name) for o in together)
    lines = {
        (module, source)
        for (module, source, name), n in many.items()
        if any(
            n * span.length == ones[module, source, name] * span.width
            and span.length < span.width
            and ones[module, source, name] >= span.length > 1
            for span in place.spans
        )
    }
    return frozenset(o for o in together if (o.module, o.source) in lines)
