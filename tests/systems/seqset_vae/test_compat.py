"""The note's batch dictionary: its keys, shapes and polarity, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.systems.seqset_vae.drawn import stays
from truebatch.errors import ConfigError
from truebatch_systems.seqset_vae.compat import micro_batch, note_batch, note_batches, padded_share, read_note_batch
from truebatch_systems.seqset_vae.data.variables import name_variables

VARIABLES = name_variables([f"v{i}" for i in range(5)], width=16)


@settings(deadline=None, max_examples=40)
@given(stays())
def test_the_batch_holds_every_event_in_its_cell_and_nothing_in_padding(made):
    samples = [made[i] for i in range(len(made))]
    batch = note_batch(samples, VARIABLES)
    longest = int(made.num_events.max())
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    B = len(samples)
    assert shapes.pop("padding_mask", (B, longest)) == (B, longest)
    assert ("padding_mask" in batch) == (B > 1)
    column = (B, longest, 1)
    assert shapes == {"var": (B, longest, 16), "val": column, "minute": column, "set_id": column, "label": (B,)}
    for at, sample in enumerate(samples):
        n = len(sample["var"])
        np.testing.assert_array_equal(batch["var"][at, :n], VARIABLES.vectors[sample["var"]])
        for name in ("val", "minute", "set_id"):
            np.testing.assert_array_equal(batch[name][at, :n, 0], sample[name])
        assert not batch["var"][at, n:].any()
        if B > 1:
            assert batch["padding_mask"][at].tolist() == [False] * n + [True] * (longest - n)


@settings(deadline=None, max_examples=30)
@given(stays())
def test_a_batch_of_the_note_becomes_the_samples_it_was_made_of(made):
    samples = [made[i] for i in range(len(made))]
    for sample, back in zip(samples, read_note_batch(note_batch(samples, VARIABLES), VARIABLES), strict=True):
        for name in ("var", "val", "minute", "set_id", "set_minute", "set_size", "label"):
            np.testing.assert_array_equal(back[name], sample[name])


@settings(deadline=None, max_examples=20)
@given(stays(most_stays=7))
def test_batches_hold_all_stays_once_and_in_order(made):
    batches = list(note_batches(made, VARIABLES, batch_size=3))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == made.labels.tolist()
    assert all(len(batch["label"]) == 3 for batch in batches[:-1])


def test_without_dynamic_padding_every_batch_is_as_wide_as_the_limit():
    sample = {
        "var": np.array([1, 2]), "val": np.ones(2, dtype=np.float32), "minute": np.zeros(2, dtype=np.float32),
        "set_id": np.array([0, 0]), "set_minute": np.zeros(1, dtype=np.float32), "set_size": np.array([2]), "label": 1,
    }  # fmt: skip
    batch = note_batch([sample, sample], VARIABLES, max_sequence_length=7)
    assert batch["var"].shape == (2, 7, 16)
    assert batch["padding_mask"].sum() == 10
    with pytest.raises(ConfigError, match="2 events, max_sequence_length=1"):
        note_batch([sample], VARIABLES, max_sequence_length=1)
    assert padded_share(micro_batch([sample], width=8)) == {"events": 0.75, "sets": 0.0}
