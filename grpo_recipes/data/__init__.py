"""Rows: where they lie, how they are read, and how they become prompts."""
