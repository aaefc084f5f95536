"""Bodies that belong to the harness itself."""

from __future__ import annotations

RECIPES = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "mxfp8_2d": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
    "nvfp4_rows": "is_nvfp4_available",
    "nvfp4_squares": "is_nvfp4_available",
}
"""TE's public check for each recipe name that the tests use; "none" needs no check."""


def recipe_support() -> dict[str, tuple[bool, str]]:
    """Return, for each recipe, whether the device (real or simulated) supports it, and TE's reason if not."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    results = {name: getattr(te, check)(return_reason=True) for name, check in RECIPES.items()}
    if not hasattr(MXFP8BlockScaling, "enable_2d_quantization"):
        results["mxfp8_2d"] = False, "2-D MXFP8 requires TransformerEngine 2.19"
    return results


def single_grouped_problem(recipe: str) -> str:
    """Return why this device does not support one parameter for all experts under a recipe; empty if it does.

    Args:
        recipe: "none" or a name in RECIPES.
    """
    from matrix.models import recipe_of

    from te_fsdp.upstream.te_modules import grouped_path_problem

    return grouped_path_problem(None) or grouped_path_problem(recipe_of(recipe))
