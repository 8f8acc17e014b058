"""Memory: measured, foreseen, fitted, and survived when it runs out."""
