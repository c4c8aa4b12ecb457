"""Recipes: their keys, reading them from YAML and the command line, and checking the values."""
