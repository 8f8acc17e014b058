"""Embeddings of texts: pooling, packed encoders, and the loss that tells a text's own partner from all others."""
