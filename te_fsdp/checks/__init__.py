"""Comparisons between ranks and validation of what the user does."""
