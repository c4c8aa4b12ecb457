"""How completions are sampled by transformers, for training and for evaluation."""
