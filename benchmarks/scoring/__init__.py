"""Judging and generating, by method."""
