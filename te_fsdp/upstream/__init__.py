"""Private names of torch and TransformerEngine, and patches of both. No other file uses any."""
