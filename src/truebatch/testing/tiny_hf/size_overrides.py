"""What the names of sizes alone get wrong when an architecture is made tiny."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from truebatch.testing.tiny_hf.sizes import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    IMAGE,
    INNER,
    KV_HEADS,
    LAYERS,
    PATCH,
    POSITIONS,
    VOCAB,
    WIDTH,
    WINDOW,
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
_TILES = {"image_grid_pinpoints": [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]}

TINY_SIZE_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {(IMAGE // PATCH) ** 2: 4}},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "encoder-decoder": {
        # Without cross-attention, which a configuration alone does not ask for, its encoder would be of no use.
        "decoder": {
            "model_type": "bert",
            "is_decoder": True,
            "add_cross_attention": True,
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": INNER,
            "max_position_embeddings": POSITIONS,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "glm4v_text": _MROPE,
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "glm_ocr_text": _MROPE,
    "hunyuan_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "glm5_next_text": {"index_topk": 16},
    "hunyuan_vl_vision": {"max_image_size": 16 * PATCH, "min_image_size": 2 * PATCH},
    "qianfan_ocr_vision": {"image_size": [IMAGE, IMAGE], "patch_size": [PATCH, PATCH]},
    "internvl_vision": {"image_size": [IMAGE, IMAGE], "patch_size": [PATCH, PATCH]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": HEADS},
    "llama4_vision_model": {"intermediate_size": 4 * WIDTH},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 150},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 150},
    "reformer": {
        "axial_pos_embds": False,
        "num_buckets": 4,
        "num_attention_heads": 2,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": WINDOW,
        "lsh_attn_chunk_length": WINDOW,
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
        "num_key_value_heads": HEADS,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Architecture (the `model_type` of a configuration or of a part of one) -> what the names alone get wrong."""
