"""Adding gradients: what is missing counts as zero, the same way in one process as between several."""

import pytest
import torch

from truebatch.errors import ConfigError
from truebatch.training.exactness.gradient_sum import add_gradients, take_gradient


def test_gradients_are_added_one_by_one():
    left = [torch.tensor([1.0, 2.0]), None, torch.tensor(3.0)]
    found = add_gradients(left, [torch.tensor([0.5, 0.25]), None, torch.tensor(1.0)])
    assert found[0].tolist() == [1.5, 2.25]
    assert found[1] is None
    assert float(found[2]) == 4.0


@pytest.mark.parametrize("is_left", [True, False])
def test_a_missing_gradient_counts_as_zeros_to_the_last_bit(is_left):
    values = torch.tensor([-0.0, 0.0, 1e-45, -1.0, float("inf")])
    given = [values.clone()] if is_left else [None]
    other = [None] if is_left else [values.clone()]
    found = add_gradients(given, other)[0]
    assert found.view(torch.int32).tolist() == (values + torch.zeros(5)).view(torch.int32).tolist()


def test_a_sparse_gradient_is_refused_by_name():
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=True"):
        take_gradient([table.weight])
