"""Measure the lengths of samples, once, and cache them."""
