"""Objective, schedules, parameter groups, callbacks, pretraining."""
