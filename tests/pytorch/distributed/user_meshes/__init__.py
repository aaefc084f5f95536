"""Bodies of user-built meshes, early forwards, state dicts in TE's scripts."""
