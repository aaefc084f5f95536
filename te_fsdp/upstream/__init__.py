"""Private names of torch and TransformerEngine, with the patches of both. No other file uses private names."""
