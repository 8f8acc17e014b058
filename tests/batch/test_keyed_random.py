"""Noise belongs to the sample, whatever its micro-batch."""

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.tiny import SETS_FIELDS, TEXT_FIELDS, counting_backend, packed, padded, set_samples, text_samples
from truebatch.batch.keyed_random import KeyedDropout, keyed_normal, keyed_uniform, name_purposes, noise_for
from truebatch.errors import BatchError
from truebatch.planning.keyed_rng import keyed_hash

SAMPLES = text_samples([3, 31, 8, 17, 1, 29])
STAYS = set_samples([[2, 5, 1], [1], [7, 3, 3, 9, 2], [4, 4]])


def drawn(batch, draw, axis="cells", **key):
    with noise_for(batch, **{"seed": 7, "epoch": 2, **key}):
        return dict(zip(batch.sample_ids, batch.per_sample(draw(), axis), strict=True))


@pytest.mark.parametrize("draw", [lambda: keyed_uniform((4, 2), "a"), lambda: keyed_normal((4,), "a")])
def test_a_sample_draws_the_same_noise_in_any_micro_batch(draw):
    alone = {}
    for i in range(6):
        alone |= drawn(padded(SAMPLES, [i], TEXT_FIELDS), draw)
    for batch in (
        padded(SAMPLES, [3, 1, 0, 5], TEXT_FIELDS, extra=4),
        padded(SAMPLES, [2, 4, 5], TEXT_FIELDS, side="left"),
        packed(SAMPLES, [5, 0, 2, 1], TEXT_FIELDS),
    ):
        for i, x in drawn(batch, draw).items():
            assert torch.equal(x, alone[i])


@pytest.mark.parametrize("axis", ["sets", "events", "samples"])
def test_nested_samples_have_noise_on_every_level(axis):
    def draw():
        return keyed_uniform((3,), "z", axis=axis)

    with noise_for(padded(STAYS, [2, 0, 3], SETS_FIELDS), seed=1):
        together = draw()
    batch = padded(STAYS, [2, 0, 3], SETS_FIELDS)
    parts = batch.per_sample(together, axis)
    first = 0
    for i in (2, 0, 3):
        one = padded(STAYS, [i], SETS_FIELDS)
        with noise_for(one, seed=1):
            alone = one.per_sample(draw(), axis)
        for part in alone:
            assert torch.equal(parts[first], part)
            first += 1
    assert len({float(p.flatten()[0]) for p in parts}) == len(parts)


@pytest.mark.parametrize("ids", [[1], [1, 0], [1, 4], [5, 6], [3, 5, 1]])
@pytest.mark.parametrize("axis", ["sets", "events"])
def test_a_sample_of_one_set_draws_the_same_beside_any_other(axis, ids):
    """Neither the number of sets nor their sum says whose they are: one set a sample, or none and two, look alike."""
    stays = set_samples([[2, 5, 1], [1], [7, 3, 3, 9, 2], [4, 4], [6], [2, 3], []])

    def drawn_by(chosen):
        batch = padded(stays, chosen, SETS_FIELDS)
        with noise_for(batch, seed=1):
            values = keyed_uniform((3,), "z", axis=axis)
        parts = iter(batch.per_sample(values, axis))
        number = batch.rows("sets").lengths if axis == "events" else [1] * len(chosen)
        return {i: [next(parts) for _ in range(n)] for i, n in zip(chosen, number, strict=True)}

    for i, parts in drawn_by(ids).items():
        for got, alone in zip(parts, drawn_by([i])[i], strict=True):
            assert torch.equal(got, alone)


@pytest.mark.parametrize("key", [{"seed": 8}, {"epoch": 3}])
def test_another_seed_or_epoch_draws_other_noise(key):
    batch = padded(SAMPLES, [1], TEXT_FIELDS)
    draw = lambda: keyed_uniform((4,), "a")  # noqa: E731
    assert not torch.equal(drawn(batch, draw)[1], drawn(batch, draw, **key)[1])
    assert not torch.equal(drawn(batch, draw)[1], drawn(batch, lambda: keyed_uniform((4,), "b"))[1])


def test_the_bits_are_those_of_the_planning_room():
    """One hash for the whole product: a sample's noise begins from the same key on every device and in NumPy."""
    batch = padded(SAMPLES, [1, 3], TEXT_FIELDS)
    with noise_for(batch, seed=7, epoch=2) as noise:
        assert noise.keys.tolist() == keyed_hash(7, 2, "noise", [1, 3]).view(np.int64).tolist()


def test_uniform_and_normal_have_the_right_shape():
    batch = padded(text_samples([4000]), [0], TEXT_FIELDS)
    uniform = drawn(batch, lambda: keyed_uniform((16,), "u"))[0]
    normal = drawn(batch, lambda: keyed_normal((16,), "n"))[0]
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(uniform.var()) == pytest.approx(1 / 12, abs=0.002)
    assert float(normal.mean()) == pytest.approx(0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    correlation = np.corrcoef(uniform.numpy()[:-1].ravel(), uniform.numpy()[1:].ravel())[0, 1]
    assert abs(correlation) < 0.02


def test_dropout_keeps_the_mean_and_is_off_in_eval_mode():
    batch = padded(text_samples([3000]), [0], TEXT_FIELDS)
    x = torch.ones(1, 3000, 8)
    dropout = KeyedDropout(0.25)
    with noise_for(batch, seed=0):
        y = dropout(x)
        assert torch.equal(dropout.eval()(x), x)
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("p", [0.1, 0.25, 1 / 3, 0.9999])
def test_dropout_zeroes_exactly_where_the_keyed_numbers_are_below_the_rate(p):
    batch = padded(text_samples([300]), [0], TEXT_FIELDS)
    with noise_for(batch, seed=0):
        y = KeyedDropout(p, purpose="here")(torch.ones(1, 300, 8))
        assert torch.equal(y != 0, keyed_uniform((8,), "here") >= p)


def test_two_dropouts_of_a_model_have_masks_of_their_own():
    model = torch.nn.Sequential(KeyedDropout(0.5), KeyedDropout(0.5))
    name_purposes(model)
    batch = padded(SAMPLES, [1], TEXT_FIELDS)
    x = torch.ones(1, 31, 8)
    with noise_for(batch, seed=0):
        assert not torch.equal(model[0](x), model[1](x))


def test_keyed_noise_outside_a_micro_batch_is_refused():
    with pytest.raises(BatchError, match="only available inside a micro-batch"):
        KeyedDropout(0.5)(torch.ones(1, 2, 3))


def in_another_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def in_a_thread_that_python_did_not_make(work):
    """As torch's own: Python's list of threads has none such."""
    done, problems = threading.Event(), []

    def run():
        try:
            work()
        except BatchError as error:
            problems.append(error)
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(600)
    for problem in problems:
        raise problem


def test_layers_that_backward_recomputes_in_a_thread_of_its_own_draw_the_same():
    """As on a GPU, whose backward pass torch runs in another thread."""
    batch, drop = packed(SAMPLES, [5, 0, 2], TEXT_FIELDS), KeyedDropout(0.5, purpose="a")
    grads = []
    for run in (lambda loss: loss.backward(), lambda loss: in_a_thread_that_python_did_not_make(loss.backward)):
        x = torch.ones(*batch.segments.shape, 4, requires_grad=True)
        with noise_for(batch, seed=1):
            run(checkpoint(lambda x: drop(x).square(), x, use_reentrant=False).sum())
        grads.append(x.grad)
    assert grads[0].eq(0).any()
    assert torch.equal(*grads)


@pytest.mark.parametrize("other", [True, False], ids=["noise of another thread", "no noise"])
def test_backward_without_its_noise_is_refused_whatever_another_thread_has_open(other):
    batch, drop = packed(SAMPLES, [5, 0, 2], TEXT_FIELDS), KeyedDropout(0.5, purpose="a")
    x = torch.ones(*batch.segments.shape, 4, requires_grad=True)
    with noise_for(batch, seed=1):
        loss = checkpoint(lambda x: drop(x).square(), x, use_reentrant=False).sum()

    def backward():
        with pytest.raises(BatchError, match="only available inside a micro-batch"):
            loss.backward()

    with noise_for(batch, seed=2) if other else nullcontext():
        in_another_thread(backward)


def test_a_model_that_was_saved_whole_before_keeps_its_masks():
    drop = KeyedDropout(0.5, purpose="a")
    state = {name: value for name, value in drop.__dict__.items() if name not in ("_word", "_purpose")}
    old = KeyedDropout.__new__(KeyedDropout)
    old.__setstate__({**state, "purpose": "a"})
    batch = packed(SAMPLES, [5, 0], TEXT_FIELDS)
    with noise_for(batch, seed=1):
        assert torch.equal(*(one(torch.ones(*batch.segments.shape, 4)) for one in (drop, old)))
    assert torch.equal(old._word, drop._word)


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 34, 4), (34, 34)])
def test_what_does_not_lie_along_the_axis_is_refused(shape):
    batch = packed(SAMPLES, [5, 0], TEXT_FIELDS, extra=2)
    with noise_for(batch, seed=1), pytest.raises(BatchError, match="has no axis 'cells'"):
        KeyedDropout(0.5)(torch.ones(shape))


def test_a_thread_that_runs_no_backward_pass_of_the_batch_has_no_noise():
    batch, drop = packed(SAMPLES, [5, 0, 2], TEXT_FIELDS), KeyedDropout(0.5, purpose="a")
    with noise_for(batch, seed=1), pytest.raises(BatchError, match="only available inside a micro-batch"):
        in_another_thread(lambda: drop(torch.ones(*batch.segments.shape, 4)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("axis", ["cells", "samples"])
def test_compiled_dropout_has_the_masks_of_the_written_one_and_one_graph_for_all_purposes(axis):
    torch.compiler.reset()
    graphs, count = counting_backend()
    for number in range(12):  # more than torch compiles one function for
        batch, drop = packed(SAMPLES, [5, 0, 2 + number % 2], TEXT_FIELDS), KeyedDropout(0.3, axis=axis)
        drop.purpose = f"layers.{number}"
        shape = (3,) if axis == "samples" else (1, 60)
        if axis == "cells":
            batch = packed(SAMPLES, [5, 0, 2 + number % 2], TEXT_FIELDS, extra=60 - sum(batch.rows().lengths))
        x = torch.randn(*shape, 4, requires_grad=True)
        with noise_for(batch, seed=number):
            written = drop(x)
            drop.compile(backend=count, fullgraph=True, dynamic=False)
            found = drop(x)
        assert torch.equal(found, written)
        assert torch.equal(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (found, written)))
    assert len(graphs) == 1
