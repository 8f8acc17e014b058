"""Score or generate for many samples: planned, in true batches, with results in a crash-safe journal.

samples -> keys -> plan -> decode -> prepare -> model -> readout -> journal -> export
"""
