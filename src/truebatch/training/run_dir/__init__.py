"""The folder of a run, who owns it, and how a run is asked to stop."""
