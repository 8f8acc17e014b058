"""Attention inside samples: one function, one dispatch table, and the kernels behind it."""
