"""A sample's logits, loss and gradient do not depend on its neighbours, on padding or on the cut of its step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.chinese_gpt.small import (
    SAMPLES,
    VOCAB,
    batch_of,
    engine_of,
    gradient_of,
    relative,
    small_model,
    weights_of,
)
from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch.batch.segments import cell_positions, padded_segments
from truebatch.errors import BatchError, ConfigError
from truebatch.training.step import apply_update
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape, vocab_of_weights
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import PAD


def logits_of(model, batch):
    with torch.no_grad():
        return batch.per_sample(model(batch["input_ids"], batch.positions, batch.segments))


@pytest.mark.parametrize(("layout", "side"), [("padded", "right"), ("padded", "left"), ("packed", "right")])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_logits_of_200_samples_do_not_depend_on_their_batch(layout, side, size):
    model = small_model().eval()
    for at in range(0, 200, size):
        ids = list(range(at, min(at + size, 200)))
        together = logits_of(model, batch_of(ids, layout=layout, side=side))
        for i, logits in zip(ids, together, strict=True):
            torch.testing.assert_close(logits, logits_of(model, batch_of([i]))[0], atol=1e-5, rtol=0)


def test_a_slow_formula_gives_the_same_logits():
    """Attention written out for one sample, without any kernel, mask or row of the library."""
    model = small_model().eval()
    sample = SAMPLES[3]["input_ids"]
    x = model.tokens.weight[sample] + model.places.weight[: len(sample)]
    for block in model.blocks:
        mixed = block.mix_in(block.norm_attention(x))
        heads = []
        for h in range(4):
            q, k, v = (mixed[:, part * 32 + h * 8 : part * 32 + h * 8 + 8] for part in range(3))
            scores = q @ k.T / 8**0.5
            scores[torch.ones_like(scores).triu(1) > 0] = -torch.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + block.mix_out(torch.cat(heads, -1))
        x = x + block.shrink(torch.relu(block.widen(block.norm_feed(x))))
    expected = model.head(model.norm_out(x))
    torch.testing.assert_close(logits_of(model, batch_of([3]))[0], expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), layout=st.sampled_from(["padded", "packed"]), dropout=st.sampled_from([0.0, 0.2]))
def test_a_step_has_one_gradient_however_it_is_cut(data, layout, dropout):
    ids = list(data.draw(st.lists(st.integers(0, 199), min_size=2, max_size=16, unique=True)))
    size = data.draw(st.integers(1, len(ids)))
    cut = [batch_of(ids[at : at + size], layout=layout) for at in range(0, len(ids), size)]
    whole, _ = gradient_of(engine_of(small_model(dropout=dropout)), [batch_of(ids)])
    pieces, _ = gradient_of(engine_of(small_model(dropout=dropout)), cut)
    assert relative(pieces, whole) < 1e-5


def test_16_at_once_16_alone_and_4_times_4_update_alike():
    ids, weights = list(range(120, 136)), []
    for size in (16, 1, 4):
        engine = engine_of(small_model(), kind=torch.optim.SGD, rate=0.5)
        _, outcome = gradient_of(engine, [batch_of(ids[at : at + size]) for at in range(0, 16, size)])
        apply_update(engine, outcome)
        weights.append(weights_of(engine.model))
    assert relative(weights[1], weights[0]) < 1e-6
    assert relative(weights[2], weights[0]) < 1e-6


def test_a_planted_gradient_is_clipped_to_a_norm_of_one_over_all_parameters():
    engine = engine_of(small_model(), kind=torch.optim.SGD)
    _, outcome = gradient_of(engine, [batch_of([0, 1])])
    for p in engine.model.parameters():
        p.grad.mul_(1e3 / outcome.grad_norm["main"])
    planted = type(outcome)(outcome.loss, {"main": 1e3}, outcome.counts)
    apply_update(engine, planted)
    norm = torch.cat([p.grad.flatten() for p in engine.model.parameters()]).norm()
    assert abs(float(norm) - 1.0) < 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_gets_no_gradient_and_its_content_changes_nothing(side):
    batch = batch_of([0, 150], side=side)
    engine = engine_of(small_model())
    before, _ = gradient_of(engine, [batch])
    assert torch.equal(engine.model.tokens.weight.grad[PAD], torch.zeros(32))
    batch["input_ids"][~batch.is_real] = 11
    after, _ = gradient_of(engine, [batch])
    assert torch.equal(before, after)


def test_a_batch_where_one_sample_has_targets_trains_from_that_one_alone():
    both, alone = batch_of([0, 5]), batch_of([0])
    both["labels"][1] = IGNORE
    together, _ = gradient_of(engine_of(small_model()), [both])
    single, _ = gradient_of(engine_of(small_model()), [alone])
    assert relative(together, single) < 1e-6


def test_a_step_without_a_target_leaves_weights_and_adam_as_they_are():
    engine = engine_of(small_model())
    _, outcome = gradient_of(engine, [batch_of([1, 2])])
    apply_update(engine, outcome)
    state = {k: v.clone() for k, v in engine.groups[0].optimiser.state[engine.model.head.weight].items()}
    weights = weights_of(engine.model)
    empty = batch_of([3, 4])
    empty["labels"].fill_(IGNORE)
    _, outcome = gradient_of(engine, [empty])
    apply_update(engine, outcome)
    now = engine.groups[0].optimiser.state[engine.model.head.weight]
    assert torch.equal(weights, weights_of(engine.model))
    assert all(torch.equal(state[name], now[name]) for name in state)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_cache_gives_the_logits_of_a_full_forward(side):
    model = ChineseGPT(ModelShape(vocabulary=60, embedding_dim=32, hidden_dim=64, heads=4)).eval()
    lengths = [128, 57, 3] if side == "left" else [128, 128, 128]
    segments = padded_segments(lengths, side=side)
    ids = torch.randint(7, 60, segments.shape, generator=torch.Generator().manual_seed(0))
    positions, is_real = cell_positions(segments), segments.is_real
    with torch.no_grad():
        full = model(ids, positions, segments)
        pieces, cache = [], None
        for start, stop in ((0, 100), *((at, at + 1) for at in range(100, 128))):
            logits, cache = model.forward_step(ids[:, start:stop], positions[:, start:stop], cache, is_real[:, :stop])
            pieces.append(logits)
    difference = (torch.cat(pieces, dim=1) - full)[is_real].abs().max()
    assert float(difference) <= 1e-5


def test_the_cache_asks_for_the_reality_of_every_cell():
    model = small_model().eval()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(BatchError, match="every cell"):
        model.forward_step(ids, ids, None, torch.ones(2, 2, dtype=torch.bool))


def test_weights_come_from_the_seed_alone_and_carry_their_vocabulary():
    torch.manual_seed(1)
    one = small_model(seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = small_model(seed=3)
    assert torch.equal(weights_of(one), weights_of(other))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(weights_of(one), weights_of(small_model(seed=4)))
    assert one.vocab.hash == VOCAB.hash == vocab_of_weights(one.state_dict()).hash


def test_heads_that_do_not_share_the_width_evenly_are_refused():
    with pytest.raises(ConfigError, match="evenly"):
        ModelShape(vocabulary=10, embedding_dim=100, heads=8)


def test_without_a_vocabulary_the_model_says_so():
    with pytest.raises(ConfigError, match="without a vocabulary"):
        _ = ChineseGPT(ModelShape(vocabulary=9, embedding_dim=8, heads=1)).vocab
