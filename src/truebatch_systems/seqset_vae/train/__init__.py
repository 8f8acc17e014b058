"""Losses, the collapse detector, callbacks, pretrained weights."""
