"""A run as files: what it recorded, its checkpoints, restarts and faults."""
