"""Planned steps and exact losses inside the training loops people have already."""
