"""The processes of a run: launcher, signals, error messages and the progress line."""
