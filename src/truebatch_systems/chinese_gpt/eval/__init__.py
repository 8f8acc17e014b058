"""Perplexity and answers of a trained model."""
