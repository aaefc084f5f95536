"""Bridges for training scripts that were written for other libraries; each is imported by its own name."""
