"""Losses that couple the samples of a step: two passes, so that no cut changes the gradient."""
