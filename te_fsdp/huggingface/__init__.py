"""Weights of sharded models for inference engines, under Hugging Face's names.

No rank stores the unsharded model: a *bucket* of weights is assembled on the devices of the receiving ranks,
converted, and yielded tensor by tensor.
"""

from te_fsdp.checkpoint.portable.weight_stream import WeightFormat, WeightStream, iter_weights, save_folder
from te_fsdp.checkpoint.portable.weight_transfer import quantization_config, quantize_blocks

__all__ = [
    "WeightFormat",
    "WeightStream",
    "iter_weights",
    "quantization_config",
    "quantize_blocks",
    "save_folder",
]
