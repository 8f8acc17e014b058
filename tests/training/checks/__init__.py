"""Checks of a run."""
