"""The balance of experts is that of the whole step, as transformers defines it for one batch, however the step is cut."""

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.training.test_step import gradient, relative
from truebatch.batch.collate import collate
from truebatch.errors import LawError
from truebatch.hf.heads.expert_balance import balanced_objective
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.testing.failpoints import armed
from truebatch.training.checks.batch_coupling import refuse_couplings
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine

CLOSE = 1e-6
SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=12, head_dim=8, decoder_sparse_step=1)
    ),
}
LENGTHS = [5, 9, 3, 14, 7, 6]
CUTS = {
    "packed": ([[0, 1, 2, 3, 4, 5]], "packed"),
    "packed in three": ([[4, 0], [5, 2, 3], [1]], "packed"),
    "padded in two": ([[0, 1, 2], [3, 4, 5]], "padded"),
    "one by one": ([[i] for i in range(6)], "padded"),
}


def engine_of(kind, **more):
    torch.manual_seed(0)
    model = KINDS[kind]().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(8.0 if "mlp.gate" in name else 1.0)  # experts are chosen by more than rounding
    objective = balanced_objective(HeadObjective(head=head_of(model)), model, model.config)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    return StepEngine(model=model, objective=objective, groups=groups, **more)


def samples(head):
    draw = np.random.default_rng(0)
    return [head.prepare({"input_ids": draw.integers(3, 40, n)}) for n in LENGTHS]


def batches_of(engine, cut):
    parts, layout = CUTS[cut]
    head = engine.objective.own.head
    data = samples(head)
    found = []
    for ids in parts:
        lengths = [LENGTHS[i] for i in ids]
        rows = (
            packed_row(np.array(ids), sum(lengths)) if layout == "packed" else padded_rows(np.array(ids), max(lengths))
        )
        found.append(collate([data[i] for i in ids], rows, head.fields))
    return found


def in_one_batch(engine):
    """Transformers' own loss of one padded batch of all samples: the slow obvious reference."""
    data = samples(engine.objective.own.head)
    ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(s["input_ids"]) for s in data], batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.int64) for n in LENGTHS], batch_first=True)
    out = engine.model(input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100), use_cache=False)
    out.loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in engine.model.parameters()]
    return float(out.loss.detach()), 0.5 * float(out.aux_loss.detach()), torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_any_cut_has_the_loss_of_one_batch_in_transformers(kind, cut):
    engine = engine_of(kind)
    whole, balance, expected = in_one_batch(engine)
    outcome, _ = gradient(engine, batches_of(engine, cut))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in engine.model.parameters()]
    assert relative(torch.cat([g.flatten() for g in grads]), expected) < CLOSE
    assert outcome.loss["balance"] == pytest.approx(balance, rel=CLOSE)
    assert sum(outcome.loss.values()) == pytest.approx(whole, rel=CLOSE)


def test_memory_that_runs_out_changes_no_balance():
    engine = engine_of("mixtral")
    guard = OomGuard(fields=engine.objective.own.head.fields)
    _, expected = gradient(engine, batches_of(engine, "packed"))
    engine = engine_of("mixtral", guard=guard)
    with armed("step.backward:oom:1"):
        _, found = gradient(engine, batches_of(engine, "packed"))
    assert guard.recoveries == 1
    assert relative(found, expected) < CLOSE


def test_without_the_objective_it_is_refused_by_name():
    model = KINDS["mixtral"]()
    with pytest.raises(LawError, match="expert balancing"):
        refuse_couplings(model, ())
    assert refuse_couplings(model, (), taken=("expert balancing",)) == []


def test_a_capacity_of_experts_is_refused_by_name():
    model = KINDS["mixtral"]()
    model.config.expert_capacity = 4
    with pytest.raises(LawError, match="expert capacity"):
        refuse_couplings(model, (), taken=("expert balancing",))
