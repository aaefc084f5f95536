"""Bodies of user-built meshes, a forward before materialize, and state dicts in TE's scripts."""
