"""Correctness of mathematical answers."""
