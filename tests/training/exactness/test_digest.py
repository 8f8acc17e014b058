"""A digest changes with every bit and every place, and with nothing else."""

import pytest
import torch

from truebatch.training.exactness.digest import joint_digest, parameter_digests, read_digests, write_digests


def digest(values):
    module = torch.nn.Module()
    module.register_buffer("x", values)
    return parameter_digests(module)["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_the_same_numbers_have_the_same_digest_wherever_they_lie(dtype):
    values = torch.arange(600).view(20, 30).to(dtype)
    assert digest(values) == digest(values.t().contiguous().t()) == digest(values.clone())


def test_every_bit_counts():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    seen = {digest(values)}
    for at in range(0, 5000, 97):
        other = values.clone()
        other.view(torch.int32)[at] ^= 1 << (at % 32)
        seen.add(digest(other))
    assert len(seen) == 1 + len(range(0, 5000, 97))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_place_shape_and_dtype_count():
    values = torch.arange(6.0)
    found = [values, values.flip(0), values.view(2, 3), values.double(), torch.zeros(6), torch.zeros(7)]
    assert len({digest(one) for one in found}) == len(found)


def test_large_tensors_are_digested_in_parts(monkeypatch):
    values = torch.randn(1000)
    whole = digest(values)
    monkeypatch.setattr("truebatch.training.exactness.digest._ENTRIES", 7)
    assert digest(values) == whole


def test_digests_are_kept_in_the_folder_of_a_run(tmp_path):
    digests = parameter_digests(torch.nn.Linear(2, 1))
    write_digests(tmp_path, 5, digests)
    assert read_digests(tmp_path, 5) == digests
    assert read_digests(tmp_path, 6) == {}
    assert joint_digest(digests) != joint_digest({**digests, "bias": "0"})
