"""What tests and drills need: tiny models, failpoints, made-up lengths."""
