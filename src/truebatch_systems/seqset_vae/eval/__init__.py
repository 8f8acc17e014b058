"""Predictions, discrimination and calibration."""
