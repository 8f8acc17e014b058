"""Judges, their processes, and the scores in their answers."""
