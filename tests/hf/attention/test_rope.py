"""Rotary embeddings that follow the length of a call: a row has the angles it has alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.generation.toys import make_prompts
from tests.hf.attention.cuts import gradient, packed, padded
from tests.hf.generate.test_packed_prefill import make
from tests.hf.tiny_models import GROUPED
from truebatch.errors import BatchError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import start_session
from truebatch.hf.attention.rope import rotary_by_length
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.packed_prefill import can_read_packed
from truebatch.hf.generate.prefix_cache import PrefixDecoder
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.testing.tiny_hf.random_samples import make_samples

COMMON = tuple(range(3, 19))
TEXTS = [(5, 6), tuple(range(3, 43)), (20, 21, 22), tuple(range(4, 15)), tuple(range(9, 33))]
"""Short and long beside each other; one of them crosses the bound while it goes on."""
BOUND = 16
SCALED = {
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": BOUND,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip


@pytest.fixture(params=SCALED)
def model(request):
    rope = SCALED[request.param]
    longest = 64 if request.param == "longrope" else BOUND
    values = {**GROUPED, "head_dim": 8, "max_position_embeddings": longest, "rope_parameters": dict(rope)}
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**values)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return made


def decoder_of(model, kind=None):
    plain = hf_decoder(model, end_ids=())
    object.__setattr__(plain, "max_length", None)  # texts longer than the model was made for are the point here
    return plain if kind is None else kind(plain)


def test_logits_of_a_short_row_do_not_depend_on_a_long_one_beside_it(model):
    prompts = make_prompts(TEXTS)
    decoder = decoder_of(model)
    alone = torch.cat([start_session(decoder, [one])[0] for one in reversed(prompts)]).flip(0)
    torch.testing.assert_close(start_session(decoder, prompts)[0], alone, rtol=1e-4, atol=1e-4)
    assert "forward" not in vars(model.model.rotary_emb)


def test_a_row_that_comes_alone_first_is_what_the_model_gives(model):
    ids = torch.tensor([TEXTS[1]])
    with torch.inference_mode():
        want = model(input_ids=ids).logits[:, -1]
    found = start_session(decoder_of(model), make_prompts(TEXTS))[0][1:2]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [None, PrefixDecoder])
def test_texts_are_those_of_each_prompt_alone_across_the_bound(model, kind):
    way = Generation(max_new_tokens=8, temperature=0)
    prompts = make_prompts(TEXTS if kind is None else [(*COMMON, 50), (*COMMON, 5, 6), (*COMMON, 40, *TEXTS[4])])
    want = [collect(generate_tokens(decoder_of(model), [one], way), 1)[0] for one in prompts]
    assert collect(generate_tokens(decoder_of(model, kind), prompts, way), len(prompts)) == want


def test_prompts_are_not_read_in_one_row_and_steps_are_not_recorded(model):
    plain = hf_decoder(model)
    assert not can_read_packed(plain)
    assert not plain.cuda_graph.is_recorded


def test_other_rotary_embeddings_are_left_alone():
    assert rotary_by_length(make("llama")) == ()
    assert rotary_by_length(make("gemma3_text")) == ()


def training_cuts(model, lengths):
    head = head_of(model)
    samples = make_samples(model, lengths)
    every = range(len(lengths))
    return head, samples, [[padded(head, samples, every)], [packed(head, samples, every)]]


def test_short_samples_are_trained_in_any_cut_also_behind_a_long_one(model):
    objective = HeadObjective(head=head_of(model))
    head, samples, cuts = training_cuts(model, [5, BOUND, 9])
    alone = [padded(head, samples, [i]) for i in range(3)]
    wanted = gradient(model, objective, alone)
    gradient(
        model, objective, [padded(head, make_samples(model, [3 * BOUND]), [0])]
    )  # what it leaves behind is forgotten
    for batches in [*cuts, alone[::-1]]:
        found = gradient(model, objective, batches)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_samples_that_would_turn_the_angles_of_others_are_not_trained_together(model):
    objective = HeadObjective(head=head_of(model))
    head, samples, cuts = training_cuts(model, [5, 2 * BOUND])
    for batches in cuts:
        with pytest.raises(BatchError, match="follow the longest sample"):
            gradient(model, objective, batches)
    in_order = [padded(head, samples, [i]) for i in (0, 1)]
    one, other = (gradient(model, objective, batches) for batches in (in_order, in_order[::-1]))
    assert float((one - other).norm() / one.norm()) < 1e-5
