"""Bodies that save on one mesh, then load on the same or a different mesh."""
