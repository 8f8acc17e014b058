"""Models in which more than attention reaches from cell to cell, packed: equal to a plain loop over their samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from truebatch.batch.collate import collate
from truebatch.batch.segments import packed_segments
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import ForwardContext, close_run, open_run
from truebatch.hf.attention.packed import packed_inputs, packing_plan_of, use_packed_attention
from truebatch.hf.heads.heads import head_of, packed_part
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.mixers.group_mask import mask_of_tensor, masks_made_by_group
from truebatch.hf.mixers.whole_row import ConvolvedApart
from truebatch.planning.rows import packed_row
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

LENGTHS = [4, 70, 11, 23, 37, 2, 18, 9]

FEW = [
    ("qwen3_next", "causal_lm"),
    ("falcon_h1", "causal_lm"),
    ("rwkv", "causal_lm"),
    ("bloom", "causal_lm"),
    ("llama4_text", "causal_lm"),
    ("deepseek_v32", "causal_lm"),
    ("deberta", "masked_lm"),
    ("bart", "seq2seq"),
    ("t5", "seq2seq"),
]
MANY = [
    *[(name, "causal_lm") for name in (
        "bamba", "codegen", "deepseek_v4", "doge", "falcon", "falcon_mamba", "glm_moe_dsa", "gpt_neo", "gptj",
        "gpt_neox_japanese", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
        "minimax", "mpt", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen4_exp_text", "recurrent_gemma", "whisper", "xlstm",
        "zamba", "zamba2",
    )],
    *[(name, "masked_lm") for name in ("convbert", "fnet", "mobilebert", "mpnet", "squeezebert", "xlm")],
    *[(name, "seq2seq") for name in ("led", "longt5", "marian", "mvp", "pegasus", "switch_transformers", "umt5")],
]  # fmt: skip


def alone(model, samples):
    """A plain loop, written without anything of the library: logits, and the gradient of a weighted sum of squares."""
    logits, loss = [], 0
    for at, sample in enumerate(samples):
        given = {
            name: torch.as_tensor(sample[name])[None] for name in ("input_ids", "decoder_input_ids") if name in sample
        }
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        found = model(**given).logits[0]
        logits.append(found.detach())
        loss = loss + (at + 1) * found.square().mean()
    return logits, gradient(model, loss)


def packed(model, samples, *, cells):
    head = head_of(model)
    rows = packed_row(np.arange(len(samples))[::-1], cells)
    batch = collate([samples[i] for i in rows.ids], rows, head.fields)
    found = HeadObjective(head=head).outputs(model, batch)["logits"]
    logits = dict(zip(batch.sample_ids, found, strict=True))
    loss = sum((at + 1) * logits[at].square().mean() for at in range(len(samples)))
    return [logits[at].detach() for at in range(len(samples))], gradient(model, loss)


def gradient(model: nn.Module, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def assert_equal(model):
    model.train()  # dropout is 0; some have no backward in evaluation mode
    samples = make_samples(model, LENGTHS, seed=3)
    expected, wanted = alone(model, samples)
    found, grown = packed(model, samples, cells=sum(LENGTHS) + 7)
    far = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    assert far < 1e-5
    assert float((grown - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("case", FEW, ids="-".join)
def test_a_packed_row_gives_every_sample_what_it_gets_alone(case):
    assert_equal(tiny_model(*case))


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids="-".join)
def test_so_do_many_more_architectures(case):
    assert_equal(tiny_model(*case))


def test_only_what_mixes_samples_is_called_by_group():
    model = tiny_model("qwen3_next")
    plan = packing_plan_of(model)
    kinds = {type(model.get_submodule(name)).__name__ for name in plan.mixers.modules}
    assert (plan.way, kinds, plan.mixers.equal) == ("table", {"Qwen3NextGatedDeltaNet"}, False)
    assert packing_plan_of(tiny_model("llama")).is_plain


def test_a_mixer_is_found_whatever_it_is_called():
    class Shuffle(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv1d(64, 64, 3)

        def forward(self, hidden_states, **kwargs):
            return self.inner(nn.functional.pad(hidden_states.mT, (2, 0))).mT

    class Beside(nn.Module):
        def __init__(self, attention, mixer):
            super().__init__()
            self.attention, self.mixer = attention, mixer

        def forward(self, hidden_states, **kwargs):
            out, weights = self.attention(hidden_states=hidden_states, **kwargs)
            return out + self.mixer(hidden_states), weights

    model = tiny_model("llama")
    for layer in model.model.layers:
        width = model.config.hidden_size
        mixer = Shuffle()
        mixer.inner = nn.Conv1d(width, width, 3)
        layer.self_attn = Beside(layer.self_attn, mixer)
    assert {name.rpartition(".")[2] for name in packing_plan_of(model).mixers.modules} == {"mixer"}
    assert_equal(model)


def test_what_mixes_samples_between_modules_is_refused_with_the_reason():
    class Averaging(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
            output = super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)
            return output.__class__(logits=output.logits + output.logits.mean(1, keepdim=True))

    model = Averaging(tiny_model("llama").config)
    with pytest.raises(AttentionError, match="no way to pack"), use_packed_attention(model):
        pass


def test_a_neighbour_moves_no_bit_of_a_sample():
    model, lengths = tiny_model("falcon_h1"), [7, 30, 4]
    ids = torch.arange(40, 40 + 41)[None]
    other = ids.clone()
    other[0, :7] += 9
    with use_packed_attention(model), torch.no_grad():
        first = model(input_ids=ids, use_cache=False, **packed_inputs(packed_segments(lengths))).logits
        second = model(input_ids=other, use_cache=False, **packed_inputs(packed_segments(lengths))).logits
    assert not torch.equal(first[:, :7], second[:, :7])
    assert torch.equal(first[:, 7:], second[:, 7:])


def test_modules_and_masks_are_as_they_were_afterwards():
    model = tiny_model("bloom")
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with use_packed_attention(model):
            model(input_ids=ids, use_cache=False, **packed_inputs(packed_segments([9, 11])))
            inside = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_that_are_run_again_in_backward_find_their_rows():
    model = tiny_model("falcon_h1").train()
    head, samples = head_of(model), make_samples(model, LENGTHS[:4], seed=3)
    rows = packed_row(np.arange(4), sum(LENGTHS[:4]))
    batch = collate(samples, rows, head.fields)
    objective = HeadObjective(head=head)
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        with objective.hold(model, batch):
            found.append(gradient(model, objective.sums(model, batch)["nll"]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


@pytest.mark.parametrize(
    ("name", "is_whole"), [("gemma3", True), ("paligemma", True), ("llava", False), ("qwen2_vl", False)]
)
def test_a_model_that_makes_the_masks_of_its_language_model_is_packed_as_a_whole(name, is_whole):
    model = tiny_model(name, "vision_language")
    head = head_of(model)
    part = packed_part(head, model)
    assert (part is model) == is_whole
    assert packing_plan_of(part).way == ("rows" if is_whole else "table")


def test_masks_of_images_beside_the_rows_are_made_as_ever():
    segments = packed_segments([3, 4])
    options = {
        "q_length": 7, "kv_length": 7, "q_offset": 0, "kv_offset": 0, "dtype": torch.float32, "device": "cpu",
        "config": None, "mask_function": lambda row, head, query, key: query >= key, "use_vmap": False,
    }  # fmt: skip
    run = ForwardContext(segments=segments, is_packed=True)
    open_run(run)
    try:
        with masks_made_by_group(dense=False):
            ours = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](batch_size=1, allow_is_causal_skip=False, **options)
            other = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](batch_size=2, allow_is_causal_skip=False, **options)
    finally:
        close_run()
    assert mask_of_tensor(ours) is not None
    assert mask_of_tensor(other) is None
    assert not other.all()


class Scan(nn.Module):
    """A running mean over the row with a short convolution before it; `kernel`: it begins anew where a table says so."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel, self.conv = kernel, nn.Conv1d(64, 64, 3, padding=2, groups=64)

    def forward(self, hidden_states, **kwargs):
        cells = self.conv(hidden_states.mT)[..., : hidden_states.shape[1]].mT
        starts = kwargs.get("cu_seq_lens_q")
        if starts is None:
            return self.mean(cells)
        if self.kernel == "none":
            raise ValueError("can't keep packed sequences apart")
        pieces = cells[0].split(starts.diff().tolist()) if self.kernel == "right" else [cells[0]]
        return torch.cat([self.mean(piece[None]) for piece in pieces], dim=1)

    def mean(self, cells):
        return cells.cumsum(1) / torch.arange(1, cells.shape[1] + 1)[:, None]


class WithScan(nn.Module):
    def __init__(self, attention, scan):
        super().__init__()
        self.attention, self.scan = attention, scan

    def forward(self, hidden_states, **kwargs):
        out, weights = self.attention(hidden_states=hidden_states, **kwargs)
        return out + self.scan(hidden_states, **kwargs), weights


@pytest.mark.parametrize("kernel", ["right", "leaking", "none"])
def test_a_table_is_given_to_kernels_that_keep_samples_apart_and_to_no_others(kernel):
    model = tiny_model("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn = WithScan(layer.self_attn, Scan(kernel))
    plan = packing_plan_of(model)
    whole = {name for name in plan.mixers.modules if name.endswith("scan")}
    assert len(whole) == 2
    assert plan.mixers.whole == (whole if kernel == "right" else frozenset())
    assert str(plan) == ("Scan in one row with a table" if kernel == "right" else "Scan by groups of similar length")
    assert_equal(model)


def test_short_convolutions_begin_anew_with_every_sample_of_one_row():
    model = tiny_model("lfm2")
    assert str(packing_plan_of(model)) == "Lfm2ShortConv in one row with a table"
    assert_equal(model)


def test_a_convolution_over_samples_is_that_of_each_alone():
    torch.manual_seed(0)
    conv, lengths = nn.Conv1d(8, 8, 4, padding=3, groups=8), torch.tensor([5, 1, 2, 9])
    row = torch.randn(1, 8, 17, requires_grad=True)
    alone = torch.cat([conv(part)[..., : part.shape[-1]] for part in row.split(lengths.tolist(), -1)], -1)
    with ConvolvedApart(lengths):
        found = conv(row)[..., :17]
        other = nn.functional.conv1d(torch.ones(1, 8, 30), conv.weight, groups=8)
    torch.testing.assert_close(found, alone)
    assert other.shape[-1] == 27
    grads = [torch.autograd.grad(value.square().sum(), [row, conv.weight, conv.bias]) for value in (found, alone)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
