"""Audit of a reward: wrong completions made from a dataset, and checks of the reward's contract."""
