"""One GRPO training step."""
