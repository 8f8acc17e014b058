"""Decode steps captured as a CUDA graph: their tensors stay in place, so a step is captured once and replayed.

rows with room in their cache -> inputs written into fixed tensors -> the recorded step -> logits of what follows

A step of generation is a thousand small kernels, and Python takes longer to ask for them than the GPU to run them. A
recorded step asks once. It reads all cells of the cache, those without a token too, which the mask keeps out. Whether a
model gives the same that way is not assumed: the first step is taken both ways.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from truebatch.hf.generate.kv_cache import GrowingLayer, grow_in_place
from truebatch.hf.numerics import are_close, distance
from truebatch.training.memory.oom import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LEAST_STEPS = 8
"""Not worth a capture for fewer cells."""
STEPS_BEFORE = 3
"""Steps of a session before one is recorded: a recording takes as long as some, and labels need only one or two."""
LOUD = 1e3
"""Value of the cells without a token while a step is on trial: a model that lets some of it through is far off."""


@dataclass(slots=True)
class CudaGraphDecoder:
    """Whether steps of a model are replayed, and what spoke against it."""

    is_equal: bool | None = None
    """None before the first step that was taken both ways."""
    is_recorded: bool = True
    """False where steps are not recorded: layers on several devices, or what cannot be recorded."""
    is_proven: bool = False
    """The first captured step gave what the eager step gives."""
    why: str = ""

    def begins(self, device: torch.device, steps: int) -> bool:
        """True on a GPU after the first steps of a session, unless it was found not to work.

        What could not be recorded later stays in fixed tensors: from session to session nothing about the bits changes.
        """
        is_wanted = bool(self.is_equal) or (self.is_equal is None and self.is_recorded)
        return is_wanted and device.type == "cuda" and steps >= STEPS_BEFORE

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The captured step; on a CPU, and for a model that cannot be captured, the eager step."""
        if not torch.cuda.is_available() or not self.is_recorded:
            return run
        try:
            written, replay = capture(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.is_recorded, self.why = False, f"a step cannot be captured: {str(error)[:200]}"
            return run
        if not self.is_proven:
            self.is_proven = self.is_recorded = are_close(replay(), written)
            self.why = "" if self.is_proven else "a captured step gives a different result than the eager step"
        return replay if self.is_proven else run

    def tried(self, run: Callable[[], Tensor]) -> Tensor | None:
        """What the first step in fixed tensors gives; None where the model cannot take one, as some no mask of ours."""
        try:
            return run()
        except Exception as error:  # whatever a model does with inputs it does not know
            if is_out_of_memory(error):
                raise
            self.is_equal, self.why = False, f"no step in fixed tensors: {type(error).__name__}: {str(error)[:200]}"
            return None

    def judge(self, found: Tensor, wanted: Tensor) -> bool:
        """Compare the first step taken both ways; whether it is the same."""
        self.is_equal = are_close(found, wanted)
        away = "" if self.is_equal else f"{distance(found, wanted):.1e}"
        self.why = away and f"logits of a step in fixed tensors are {away} away"
        return self.is_equal


def is_on_single_gpu(model: nn.Module) -> bool:
    """True where all layers are on one device and nothing moves them: only then a recording holds all of a step."""
    devices = {weight.device for weight in model.parameters()}
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and not getattr(model, "hf_device_map", None)


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [B, H, R, D] with room; a new cell is written at `at`, and all cells are given."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.at = keys, values, at
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Write one cell a row."""
        self.keys.index_copy_(2, self.at, key_states)
        self.values.index_copy_(2, self.at, value_states)
        return self.keys, self.values


Step = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""ids [B, 1], positions [B], which cells are seen [B, 1, 1, R], cache -> [B, V] logits."""
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Eager step -> what is called instead of it."""


@dataclass(slots=True, eq=False)
class FixedSteps:
    """Rows that go on in fixed tensors."""

    step: Step
    cache: Any
    at: Tensor  # [1] where the next cell is written
    ids: Tensor  # [B, 1]
    place: Tensor  # [B] the position of each row's next token
    is_seen: Tensor  # [B, 1, 1, R]
    length: int
    """Cells with a token, a host number."""
    rows: Tensor
    """Numbers of the rows that still go on."""
    replay: Callable[[], Tensor] | None = None

    @property
    def has_room(self) -> bool:
        """False when the next token would not fit."""
        return self.length < self.is_seen.shape[-1]

    def advance(self, tokens: Tensor, capture: Record) -> Tensor:
        """Append one token to every row that continues; [B, V] logits of what follows."""
        self.ids[self.rows, 0] = tokens
        self.at.fill_(self.length)
        self.is_seen[..., self.length] = True
        if self.replay is None:
            # Not a method of this object, which would then wait for the garbage collector.
            self.replay = capture(partial(self.step, self.ids, self.place, self.is_seen, self.cache))
        logits = self.replay()[self.rows]
        self.place[self.rows] += 1  # rows that ended stay within the model's positions
        self.length += 1
        return logits

    def fill_room(self, value: float) -> None:
        """Give cells without a token this value; their keys stay nought."""
        for layer in self.cache.layers:
            layer.values[:, :, self.length :] = value

    def last_cells(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of the last step, of every layer."""
        at = self.length - 1
        return [(layer.keys[:, :, at].clone(), layer.values[:, :, at].clone()) for layer in self.cache.layers]

    def put_last_cells(self, cells: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write such copies."""
        for layer, (keys, values) in zip(self.cache.layers, cells, strict=True):
            layer.keys[:, :, self.length - 1], layer.values[:, :, self.length - 1] = keys, values

    def select(self, rows: Tensor) -> bool:
        """Continue with these rows in place; False where they must be laid out again: too few, or one twice."""
        kept = self.rows[rows.to(self.rows.device)]
        if 2 * len(kept) < len(self.place) or len(set(kept.tolist())) < len(kept):
            return False
        self.rows = kept
        return True

    def growing(self, config: PretrainedConfig) -> Any:
        """The cache of the cells with a token, as one that grows."""
        cache = DynamicCache(config=config)
        for layer, fixed in zip(cache.layers, self.cache.layers, strict=True):
            layer.lazy_initialization(fixed.keys, fixed.values)
            layer.keys, layer.values = fixed.keys[:, :, : self.length], fixed.values[:, :, : self.length]
        return grow_in_place(cache)


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
    """Run once in eager mode, then capture: returns the result and a replay on the same tensors."""
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        written = run()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return written, replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """While open, garbage collection is off: it could free an older graph, which breaks the capture of a new one."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def fix_rows(step: Step, cache: Any, is_real: Tensor, place: Tensor, *, config: PretrainedConfig) -> FixedSteps | None:
    """The rows of a cache that grows as fixed tensors, without a copy; None where it has too little room."""
    layers: Sequence[Any] = getattr(cache, "layers", ())
    held = [layer.held_cells() for layer in layers if type(layer) is GrowingLayer]
    if not layers or len(held) < len(layers) or any(one is None for one in held):
        return None
    length = is_real.shape[1]
    cells = held[0][0].shape[2]  # type: ignore[index]
    if cells - length < LEAST_STEPS or any(part.shape[2] != cells for pair in held for part in pair or ()):
        return None
    at = torch.zeros(1, dtype=torch.int64, device=is_real.device)
    fixed = DynamicCache(config=config)
    fixed.layers[:] = [FixedLayer(*pair, at) for pair in held if pair is not None]
    for layer in fixed.layers:  # whatever is there is multiplied by zero, and NaN would stay NaN
        layer.keys[:, :, length:] = 0
        layer.values[:, :, length:] = 0
    is_seen = torch.zeros((len(is_real), 1, 1, cells), dtype=torch.bool, device=is_real.device)
    is_seen[:, 0, 0, :length] = is_real
    ids = torch.zeros((len(is_real), 1), dtype=torch.int64, device=is_real.device)
    rows = torch.arange(len(is_real), device=is_real.device)
    return FixedSteps(step, fixed, at, ids, place.clone(), is_seen, length, rows)
