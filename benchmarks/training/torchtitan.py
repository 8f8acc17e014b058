"""torchtitan's Llama 3 with the weights of a model of transformers, for the training benchmark.

Two of its versions are known: 0.2, for torch 2.11, and 0.3, which needs a newer one. Both know the documents of a row:
0.2 gives them to attention as lengths (its flexible attention tunes itself for minutes), 0.3 as a mask of flexible
attention. Layers are compiled one by one, and so is the loss, which 0.3 takes in chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens, labels and positions of packed rows, [B, L] each -> the sum of the loss over its labels."""


@functools.cache
def _is_0_2() -> bool:
    return version("torchtitan").startswith("0.2.")


def titan_step(model: Any, *, cells: int, backend: str) -> Step:
    """A step of torchtitan on a model of its own, compiled; it shares no weight with the one that is given."""
    make = _step_of_0_2 if _is_0_2() else _step_of_0_3
    return make(model, cells=cells, backend=backend)


def titan_model(model: Any, *, cells: int) -> Any:
    """torchtitan's model with these weights, on the same device, for rows of up to `cells` cells."""
    make = _model_of_0_2 if _is_0_2() else _model_of_0_3
    with torch.device(model.device), torch.no_grad():
        made, weights = make(model, cells=cells)
    made.load_state_dict(weights)
    for p in made.parameters():
        p.data = p.data.to(model.dtype)  # not the module: its table of angles is complex
    return made


def titan_masks(made: Any, positions: Tensor) -> Any:
    """The mask of its attention: causal, and no token sees another sample than its own."""
    if _is_0_2():  # it looks for the last token of a document, not for the first
        return made.get_attention_masks(torch.roll((positions == 0).long(), -1, 1), SimpleNamespace(eos_id=1))
    return made.get_attention_masks(positions)


def _step_of_0_2(model: Any, *, cells: int, backend: str) -> Step:
    from torchtitan.components.loss import cross_entropy_loss

    made = _compiled(titan_model(model, cells=cells), backend)
    loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(cross_entropy_loss, backend=backend)
    return lambda ids, labels, positions: loss(made(ids, titan_masks(made, positions), positions), labels)


def _step_of_0_3(model: Any, *, cells: int, backend: str) -> Step:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import CompileConfig

    made = _compiled(titan_model(model, cells=cells), backend)
    made._skip_lm_head = True
    settings = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())
    loss: Any = ChunkedLossWrapper(settings, compile_config=CompileConfig(enable=True, backend=backend))
    loss.set_lm_head(made.lm_head)

    def step(ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        total: Tensor = loss(made(ids, positions, titan_masks(made, positions)), labels)[0]
        return total

    return step


def _compiled(made: Any, backend: str) -> Any:
    for layer in made.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    return made


def _model_of_0_2(model: Any, *, cells: int) -> tuple[Any, dict[str, Tensor]]:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    c = model.config
    args = TransformerModelArgs(
        dim=c.hidden_size, n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads, vocab_size=c.vocab_size, multiple_of=c.intermediate_size,
        norm_eps=c.rms_norm_eps, rope_theta=c.rope_parameters["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0), max_seq_len=cells, attn_type="varlen",
        attn_mask_type="block_causal",
    )  # fmt: skip
    made = Transformer(args)
    made.init_weights(buffer_device=model.device)
    return made, Llama3StateDictAdapter(args, None).from_hf(model.state_dict())


def _model_of_0_3(model: Any, *, cells: int) -> tuple[Any, dict[str, Tensor]]:
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    c, init = model.config, {"weight": skip_param_init}
    width, heads = c.hidden_size, c.num_attention_heads

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=c.rms_norm_eps, param_init=init)

    def layer() -> Any:
        theta = c.rope_parameters["rope_theta"]
        rope = ComplexRoPE.Config(dim=width // heads, max_seq_len=cells, theta=theta, scaling="none")
        attention = make_gqa_config(
            dim=width, n_heads=heads, n_kv_heads=c.num_key_value_heads, wqkv_param_init=init, wo_param_init=init,
            inner_attention=get_attention_config("flex"), rope=rope, fuse_qkv=True,
        )  # fmt: skip
        mlp = make_ffn_config(dim=width, hidden_dim=c.intermediate_size, w1_param_init=init, w2w3_param_init=init)
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=mlp
        )

    config = Llama3Model.Config(
        dim=width, vocab_size=c.vocab_size, norm=norm(), layers=[layer() for _ in range(c.num_hidden_layers)],
        tok_embeddings=Embedding.Config(num_embeddings=c.vocab_size, embedding_dim=width, param_init=init),
        lm_head=Linear.Config(in_features=width, out_features=c.vocab_size, param_init=init),
    )  # fmt: skip
    made = config.build()
    made.init_states(buffer_device=model.device)
    return made, Llama3StateDictAdapter(config, None).from_hf(model.state_dict())
