"""Sampling completions with transformers, and checking that the policy sampled them."""
