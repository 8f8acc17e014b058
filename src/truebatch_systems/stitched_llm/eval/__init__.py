"""Perplexity, and the search for layers that fit."""
