"""``set_device_mesh`` per TE module kind; forward on local tensors; initialisation of sharded parameters."""

from te_fsdp.modules.apply import set_device_mesh

__all__ = ["set_device_mesh"]
