"""The training room: one step, however it is cut, and a run that can be killed at any moment."""
