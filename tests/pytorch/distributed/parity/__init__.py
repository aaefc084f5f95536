"""Bodies that train a sharded model beside the single-process stock TE model and compare the two by value."""
