"""Models: Qwen3 dense, from a Hugging Face checkpoint to decoded tokens."""
