"""For type checkers: te_fsdp's classes of TransformerEngine's modules, which :mod:`te_fsdp.bind_device_mesh` makes.

TE is not typed, so that its signatures stand here (TE 2.20; older versions lack a few arguments), with ``tp_mesh`` and
``weight_mesh``. ``tests/unit/test_types.py`` compares them with the installed TE.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformer_engine.pytorch as te  # type: ignore[import-not-found, import-untyped]
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.modules.grouped import GroupedModule
from te_fsdp.modules.mixin import MeshModule, OpMeshModule, ResettableModule

class Linear(ResettableModule, te.Linear):
    """TransformerEngine's ``Linear`` that can be bound to meshes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class LayerNormLinear(ResettableModule, te.LayerNormLinear):
    """TransformerEngine's ``LayerNormLinear`` that can be bound to meshes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-05,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class LayerNormMLP(ResettableModule, te.LayerNormMLP):
    """TransformerEngine's ``LayerNormMLP`` that can be bound to meshes."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-05,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[..., Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class GroupedLinear(GroupedModule, te.GroupedLinear):
    """TransformerEngine's ``GroupedLinear`` that can be bound to meshes."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class LayerNorm(OpMeshModule, te.LayerNorm):
    """TransformerEngine's ``LayerNorm`` that can be bound to meshes."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-05,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None: ...

class RMSNorm(OpMeshModule, te.RMSNorm):
    """TransformerEngine's ``RMSNorm`` that can be bound to meshes."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-05,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None: ...

class DotProductAttention(ResettableModule, te.DotProductAttention):
    """TransformerEngine's ``DotProductAttention`` that can be bound to meshes."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | list[ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: torch.cuda.Stream | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class MultiheadAttention(MeshModule, te.MultiheadAttention):
    """TransformerEngine's ``MultiheadAttention`` that can be bound to meshes."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-05,
        init_method: Callable[..., Any] | None = None,
        output_layer_init_method: Callable[..., Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-06,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...

class TransformerLayer(MeshModule, te.TransformerLayer):
    """TransformerEngine's ``TransformerLayer`` that can be bound to meshes."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-05,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[..., Any] | None = None,
        output_layer_init_method: Callable[..., Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-06,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
    ) -> None: ...
