"""Bodies of what people try first: torch's own mesh, a mesh with further axes, a forward too early, TE's scripts."""
