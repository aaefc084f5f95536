"""Every recipe through every module, compared with one process."""
