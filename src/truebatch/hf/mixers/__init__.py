"""Modules that mix the cells of a row, in packed rows: found by a trial, run on the rows of their samples alone."""
