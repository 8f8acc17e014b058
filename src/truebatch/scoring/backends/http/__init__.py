"""An OpenAI-compatible server as a backend: address, requests and responses."""
