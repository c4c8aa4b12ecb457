"""Processes of a run: launcher, signals, collective calls, error messages and the progress line."""
