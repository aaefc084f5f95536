"""Bodies that save on one mesh and load on the same or another one."""
