"""Files of a run: its record, its checkpoints and their manifests, its lock, and its logged completions."""
