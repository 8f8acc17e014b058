"""Fine-tuning with images: records, placeholders and samples of `--task vlm`."""
