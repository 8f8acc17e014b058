"""Judging and generating for many samples: planned, in true batches, into a journal that loses nothing.

samples -> keys -> plan -> decode -> prepare -> model -> readout -> journal -> export
"""
