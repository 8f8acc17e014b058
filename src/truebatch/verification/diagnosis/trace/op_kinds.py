"""What kind of operation a function of torch is, by its name."""

from __future__ import annotations

import re

ATTENTION = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention", "flex_attention",
     "_transformer_encoder_layer_fwd"}
)  # fmt: skip
CONVOLUTION = ("conv1d", "conv2d", "conv3d", "conv_transpose", "conv_tbc", "avg_pool", "max_pool", "lp_pool", "unfold")
RECURRENT = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"}
)
RUNNING = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})
PICKED = frozenset({"__getitem__", "select", "narrow", "gather", "index_select", "take_along_dim", "unbind", "split"})
INDEXED = PICKED | {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter", "scatter_", "scatter_reduce",
                    "index_copy", "index_put", "index_put_", "__setitem__", "segment_reduce"}  # fmt: skip
MOVED = frozenset({"roll", "flip", "pad", "cat", "concat", "stack", "fliplr", "flipud", "__setitem__", *PICKED})
RANKED = frozenset({"sort", "argsort", "topk", "kthvalue", "msort", "unique", "_unique2", "median", "unique_consecutive",
                    "quantile", "searchsorted", "bincount", "histc", "mode", "nanmedian"})  # fmt: skip
TRANSFORMED = ("fft", "stft", "interpolate", "upsample", "grid_sample")
NORMALISED = frozenset({"layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize", "softmax", "log_softmax",
                        "local_response_norm", "softmin", "gumbel_softmax"})  # fmt: skip
REDUCED = frozenset({"mean", "sum", "amax", "amin", "max", "min", "logsumexp", "prod", "norm", "vector_norm", "nanmean",
                     "nansum", "any", "all", "argmax", "argmin", "std", "var", "var_mean", "std_mean", "aminmax",
                     "count_nonzero", "linalg_norm", "linalg_vector_norm"})  # fmt: skip
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm", "tensordot", "mm", "addmm"})
RANDOM = re.compile(r"(rand.*|bernoulli_?|normal_?|.*dropout.*|multinomial|uniform_|exponential_|log_normal_)")
VIEWS = frozenset({"transpose", "permute", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous",
                   "swapaxes", "movedim", "t", "__get__", "to", "float", "type_as", "clone", "mT"})  # fmt: skip
TABLES = frozenset({"embedding", "__getitem__", "index_select", "gather", "take_along_dim", "sin", "cos", "one_hot",
                    "embedding_bag", "outer", "einsum", "mul", "matmul", "__matmul__"})  # fmt: skip
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__radd__", "__rsub__", "__rmul__",
                        "__truediv__", "__floordiv__", "__mod__", "__neg__", "floor_divide", "remainder", "long", "int",
                        "sum", "clamp", "rsub", "true_divide", "floor", "round", "where", "masked_fill", "masked_fill_",
                        "__iadd__", "__isub__", "add_", "sub_"})  # fmt: skip
COUNTED = frozenset({"arange", "linspace", "cumsum", "range", "logspace"})
CASTS = frozenset({"half", "bfloat16", "to", "float", "type", "type_as", "quantize_per_tensor", "round"})
WEIGHED = frozenset({"linear", "bilinear"})
