"""Statistics, reports and comparisons."""
