"""Run with `pytest`: the fixture comes with truebatch."""

from model import batched, samples, single


def test_a_batch_is_equal_to_one_by_one(assert_batchable):
    assert_batchable(batched, one=single, samples=samples)
