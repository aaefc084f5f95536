"""Bodies that train a sharded model, compared by value with a single-process stock TE model."""
