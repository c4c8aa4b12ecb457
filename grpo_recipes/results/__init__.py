"""What a run shows: evaluation, diagnosis, report."""
