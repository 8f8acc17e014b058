"""Parameter groups, schedules, gradient accumulation and the optimizer step."""
