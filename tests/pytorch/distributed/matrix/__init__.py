"""Every recipe through every module: what is combined, what is refused, and the comparison with one process."""
