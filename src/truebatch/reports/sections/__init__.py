"""Sections of a report, each read from what a run folder holds."""
