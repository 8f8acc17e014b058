"""Donors, adapter and the stitched model, in memory and on disk."""
