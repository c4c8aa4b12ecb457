"""Checks of a recipe before a model is loaded."""
