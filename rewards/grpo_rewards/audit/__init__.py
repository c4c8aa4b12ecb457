"""Audit of a reward: wrong completions made from a dataset, checks of the reward's contract, and lazy strategies."""
