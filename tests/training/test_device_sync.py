"""A step waits for its device once, however many micro-batches it has."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hf.attention.cuts import packed, padded
from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import KeyedDropout, noise_for
from truebatch.hf.attention import packed as attention
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.training import step, validation
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, accumulate, apply_update, step_counts, take_gradients
from truebatch.verification import compare
from truebatch.verification.api import verify

LENGTHS = [5, 19, 9, 24, 3, 14]
WAITING = {
    torch.ops.aten._local_scalar_dense.default: "a number is read",
    torch.ops.aten.nonzero.default: "True entries are counted",
    torch.ops.aten.masked_select.default: "True entries are counted",
    torch.ops.aten.repeat_interleave.Tensor: "repeats are added up",
}


class Waits(TorchDispatchMode):
    """Notes every operation for whose result the host would wait on a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        knows_size = (kwargs or {}).get("output_size") is not None
        if func in WAITING and not knows_size:
            self.seen.append(WAITING[func])
        if func is torch.ops.aten.index.Tensor and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        ):
            self.seen.append("True entries are counted")
        return func(*args, **(kwargs or {}))


def engine_of(model, objective, device="cpu"):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    return StepEngine(
        model=model, objective=objective, groups=make_groups([Group(optimiser=optimiser)], model),
        device=torch.device(device),
    )  # fmt: skip


def micro_batches(head, samples):
    fixed = collate([samples[i] for i in (3, 0)], packed_row(np.array([3, 0]), 40), head.fields, slots=8)
    return [packed(head, samples, [1, 2]), fixed, packed(head, samples, [4, 5])]


@pytest.mark.parametrize("case", [("llama", "causal_lm"), ("bert", "masked_lm"), ("bert", "token_classification")])
def test_packed_micro_batches_wait_for_nothing(case):
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    engine, batches = engine_of(model, HeadObjective(head=head)), micro_batches(head, samples)
    counts = step_counts(batches, engine.objective, {}, device=engine.device)
    accumulate(engine, batches, counts, epoch=0)  # the first one looks at the model
    with Waits() as waits:
        accumulate(engine, batches, counts, epoch=0)
    assert waits.seen == []
    with Waits() as waits:
        batches[0]["labels"].max().item()
    assert waits.seen == ["a number is read"]


def test_a_whole_step_with_its_update_waits_once():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    engine, batches = engine_of(model, HeadObjective(head=head)), micro_batches(head, samples)
    counts = step_counts(batches, engine.objective, {}, device=engine.device)
    take_gradients(engine, batches, counts, epoch=0)
    for group in engine.groups:
        group.optimiser.step = lambda: None  # torch's own, which counts its steps on the host where it is not fused
    with Waits() as waits:
        apply_update(engine, take_gradients(engine, batches, counts, epoch=0))
    # `tolist` of all numbers of the step at once; its entries are read one by one on the host.
    assert len(waits.seen) <= 1 + len(engine.groups)


def test_keyed_noise_waits_for_nothing():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    batch = packed(head, samples, range(6))
    drop = KeyedDropout(0.5).train()
    with noise_for(batch, seed=1), Waits() as waits:
        drop(torch.ones(*batch.segments.shape, 3))
    assert waits.seen == []


def test_routes_are_chosen_from_what_the_host_knows():
    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    objective = HeadObjective(head=head, plain_alone=True)
    batches = [padded(head, samples, [1]), padded(head, samples, [1], extra=2)]
    with Waits() as waits:
        routes = [objective.route(batch) for batch in batches]
    assert routes == ["alone", "padded"]
    assert waits.seen == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_card_no_micro_batch_synchronises():
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    head, samples = head_of(model), make_samples(model, LENGTHS)
    engine = engine_of(model, HeadObjective(head=head), "cuda")
    batches = micro_batches(head, samples)
    counts = step_counts(batches, engine.objective, {}, device=engine.device)
    pinned = [batch.pin_memory() for batch in batches]
    accumulate(engine, pinned, counts, epoch=0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulate(engine, pinned, counts, epoch=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_an_evaluation_and_a_proof_do_without_kernels_that_are_planned_for_every_shape(monkeypatch):
    is_open, seen = [], []

    @contextmanager
    def noted(device):
        is_open.append(device)
        yield
        is_open.pop()

    model = tiny_model("llama")
    head, samples = head_of(model), make_samples(model, LENGTHS)
    engine, batches = engine_of(model, HeadObjective(head=head)), micro_batches(head, samples)
    counts = step_counts(batches, engine.objective, {}, device=engine.device)
    for module in (step, validation, compare, attention):
        monkeypatch.setattr(module, "without_cudnn_sdpa", noted)
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: seen.append(("forward", bool(is_open))))
    layer.input_layernorm.weight.register_hook(lambda _grad: seen.append(("backward", bool(is_open))))
    accumulate(engine, batches, counts, epoch=0)
    assert set(seen) == {("forward", True), ("backward", True)}
    seen.clear()
    with torch.no_grad():
        for batch in batches:
            validation._sums_of_batch(engine, batch)
    assert set(seen) == {("forward", True)}
    seen.clear()
    verify(model, make_samples(model, [3, 5]))
    assert ("forward", True) in seen
    assert set(seen) - {("forward", False)} == {("forward", True), ("backward", True)}
