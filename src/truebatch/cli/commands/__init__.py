"""The commands: each parses, calls one public function and prints."""
