"""Corpora, samples and the embedded texts."""
