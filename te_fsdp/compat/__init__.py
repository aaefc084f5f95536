"""Bridges for training scripts written for other libraries. Import each one by its own name."""
