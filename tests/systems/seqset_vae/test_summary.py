"""One more set at the end of a stay, against a slow and obvious one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.systems.seqset_vae.tiny_stays import make_stays as draw_stays
from truebatch_systems.seqset_vae.config import GeneratorConfig, ModelConfig, SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import NOTHING, make_stays
from truebatch_systems.seqset_vae.data.prepare import prepare
from truebatch_systems.seqset_vae.data.transform import SUMMARY, append_summary


def slow_summary(sample, number, first):
    found = []
    for var in sorted(set(sample["var"].tolist()) - {NOTHING}):
        values = [v for v, one in zip(sample["val"].tolist(), sample["var"].tolist(), strict=True) if one == var]
        figures = [math.log(len(values)), values[-1]]
        figures += [sum(values) / len(values), min(values), max(values)] if len(values) > 1 else []
        found += [(var + first + k * number, figure) for k, figure in enumerate(figures)]
    return found


def test_the_last_set_sums_up_what_was_charted():
    stays = make_stays(draw_stays(6))
    number, first = int(stays.var.max()) + 1, 100
    longer = append_summary(stays, stays, num_variables=number, first=first)
    assert longer.ids == stays.ids
    for i in range(len(stays)):
        before, after = stays[i], longer[i]
        expected = slow_summary(before, number, first)
        events = len(before["var"])
        assert after["var"][:events].tolist() == before["var"].tolist()
        assert after["var"][events:].tolist() == [var for var, _ in expected]
        np.testing.assert_allclose(after["val"][events:], [value for _, value in expected], rtol=1e-5, atol=1e-6)
        assert after["set_size"].tolist() == [*before["set_size"].tolist(), *([len(expected)] if expected else [])]
        assert after["set_minute"][-1] == before["set_minute"][-1]


def test_a_summary_knows_nothing_of_later_hours_and_is_scaled_by_the_training_stays():
    config = SeqSetConfig(
        generator=GeneratorConfig(stays=60, num_variables=12), model=ModelConfig(embedding_dim=8), summarise=True,
        first_hours=12.0,
    )  # fmt: skip
    ready = prepare(config)
    plain = prepare(SeqSetConfig(generator=config.generator, model=config.model, first_hours=12.0))
    assert len(ready.variables) == (1 + len(SUMMARY)) * len(plain.variables)
    mean = len(plain.variables) + 2 * len(plain.variables) + plain.variables.numbers()["HR"]
    assert ready.variables.names[mean] == "HR, mean"
    values = ready.train.val[ready.train.var == mean]
    assert values.mean() == pytest.approx(0, abs=0.05)
    assert values.std() == pytest.approx(1, abs=0.1)
    sizes = ready.train.num_sets - plain.train.num_sets
    assert sizes.tolist() == [1] * len(sizes)
    assert ready.train.set_minute.max() < 12 * 60
