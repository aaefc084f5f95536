"""Bodies that save on one mesh and load on the same or a different mesh."""
