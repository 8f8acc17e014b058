"""Settings: YAML, overrides and rules become one validated dataclass."""
