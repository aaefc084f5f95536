"""Private names of other libraries. No other file uses private names."""
