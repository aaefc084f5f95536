"""``set_device_mesh`` per TE module kind; forward on local tensors; initialisation of sharded parameters."""
