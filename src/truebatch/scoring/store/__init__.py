"""What a scoring run keeps: journal, manifest, input index, export."""
