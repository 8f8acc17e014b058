"""Decoding with Hugging Face models: caches, prefill, CUDA graphs."""
