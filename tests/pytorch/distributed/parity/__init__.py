"""Bodies that train a sharded model and a single-process stock TE model and compare the two by value."""
