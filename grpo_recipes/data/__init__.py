"""Datasets: reading rows from files and the hub, and making prompts of them."""
