"""One training step: how completions are sampled, scored and learnt from."""
