"""Nested state comes back equal, with its types and bits, or is refused by its place."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import CheckpointError
from truebatch.io.atomic_files import to_json
from truebatch.training.checkpoint import tensor_files
from truebatch.training.checkpoint.pytree import pack, unpack
from truebatch.training.checkpoint.tensor_files import nonfinite_names, read_tensors, write_tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def equal(a, b) -> bool:
    """The slow, obvious comparison: same type, same bits, all the way down."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def through_files(value, folder):
    packed = pack(value)
    (folder / "t.safetensors").unlink(missing_ok=True)
    write_tensors(folder / "t.safetensors", packed.tensors)
    return unpack(json.loads(to_json(packed.values)), read_tensors(folder / "t.safetensors"))


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    width = torch.empty((), dtype=dtype).element_size()
    low = torch.randint(0, 2 if dtype == torch.bool else 256, [*shape, width], generator=torch.manual_seed(seed))
    return low.to(torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(
    random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31)
)
arrays = st.builds(
    lambda dtype, n: np.arange(n).astype(dtype), st.sampled_from(["<u4", "<i8", "<f8", "<f4", "?"]), st.integers(0, 5)
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8), tensors, arrays
)
keys = st.one_of(
    st.text(max_size=4), st.integers(-5, 5), st.just("$"), st.tuples(st.integers(0, 3), st.text(max_size=2))
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=120)
@given(value=values)
def test_any_nested_value_comes_back_equal_bit_for_bit(value, tmp_path_factory):
    assert equal(value, through_files(value, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_of_the_format_reads_what_we_write(dtype, tmp_path):
    many = {f"层.{i}": random_tensor(dtype, shape, i) for i, shape in enumerate([[], [0], [3], [2, 5]])}
    many["byte"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    write_tensors(tmp_path / "a.safetensors", many)
    back = read_tensors(tmp_path / "a.safetensors")
    assert set(back) == set(many)
    assert all(equal(many[name], back[name]) for name in many)


def test_views_that_are_not_contiguous_keep_their_values(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "columns": base[:, ::2],
        "turned": base.t(),
        "wide": torch.ones(1).expand(5),
        "conj": torch.tensor(1j).conj(),
    }
    back = through_files(value, tmp_path)
    assert all(torch.equal(value[name], back[name]) for name in value)


def test_a_tensor_in_two_places_is_stored_once_and_two_equal_tensors_twice():
    weight = torch.ones(3)
    packed = pack({"embed": weight, "head": weight, "other": torch.ones(3)})
    assert len(packed.tensors) == 2
    back = unpack(packed.values, packed.tensors)
    assert back["embed"] is back["head"]


def test_names_that_run_together_do_not_collide():
    value = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    packed = pack(value)
    assert equal(value, unpack(packed.values, packed.tensors))


def test_counters_and_sets_stay_what_they_are():
    value = {"milestones": Counter({3: 1, 9: 2}), "seen": {1, 2}}
    packed = pack(value)
    back = unpack(json.loads(to_json(packed.values)), packed.tensors)
    assert back == value
    assert isinstance(back["milestones"], Counter)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"state": {"w": [1, print]}}, r"part\.state\.w\.1"),
        ({"x": torch.empty(2, device="meta")}, r"part\.x"),
        ({"x": torch.eye(2).to_sparse()}, r"part\.x"),
        ({"x": np.array([{}], dtype=object)}, r"part\.x"),
        ({"x": Counter}, "type"),
    ],
)
def test_what_would_need_pickle_is_refused_by_its_place(value, word):
    with pytest.raises(CheckpointError, match=word):
        pack(value, name="part")


def test_a_dtype_without_a_place_in_the_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="complex128"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(1, dtype=torch.complex128)})


@settings(deadline=None, max_examples=60)
@given(
    values=st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["$", "of", "a"]), inner, max_size=3),
            st.builds(
                lambda kind, of: {"$": kind, "of": of},
                st.sampled_from(["tensor", "array", "dict", "set", "tuple", "float", "bytes", "counter", "x"]),
                inner,
            ),
        ),
        max_leaves=8,
    )
)
def test_foreign_values_are_read_or_refused_and_never_crash(values):
    with contextlib.suppress(CheckpointError):
        unpack(values, {"a": torch.zeros(1)})


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_nan_and_infinity_are_found_in_every_float(dtype):
    bad = torch.full((3,), math.nan).to(dtype)
    many = {"fine": torch.ones(3).to(dtype), "bad": bad, "whole": torch.ones(3, dtype=torch.int64)}
    assert nonfinite_names(many) == ["bad"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        RuntimeError("unable to mmap 24132248 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    ],
    ids=["safetensors", "torch"],
)
def test_a_file_that_cannot_be_mapped_is_read(error, tmp_path, monkeypatch):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])}
    write_tensors(tmp_path / "t.safetensors", tensors)
    monkeypatch.setattr(tensor_files, "load_file", lambda _path: (_ for _ in ()).throw(error))
    found = read_tensors(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_any_other_failure_to_read_a_file_is_raised(tmp_path, monkeypatch):
    write_tensors(tmp_path / "t.safetensors", {"a": torch.zeros(2)})
    monkeypatch.setattr(
        tensor_files, "load_file", lambda _path: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(PermissionError):
        read_tensors(tmp_path / "t.safetensors")
