"""Models: Qwen3 and Qwen2-MoE, from a Hugging Face checkpoint to decoded tokens."""
