"""What TransformerEngine says of itself, as one JSON line: ``python -m te_fsdp.cli.env_te``.

A process of its own, since mixed libraries do not only raise: they abort the process that imports them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

#: Of Llama-3-8B, one sequence of 4096: which backend is picked depends on the shape.
_ATTENTION = {"heads": 32, "groups": 8, "head_dim": 128, "sequence": 4096}


def main() -> int:
    """Import TE (emulated where ``TE_FSDP_EMULATION`` says so), print what it can do."""
    import te_fsdp.emulation

    emulated = te_fsdp.emulation.install_from_env()
    from te_fsdp import _te
    from te_fsdp._te_formats import FORMATS

    te = _te.te()
    recipes: dict[str, str] = {}
    for row in FORMATS.values():
        if row.available:
            available, reason = getattr(te, row.available)(return_reason=True)
            recipes[row.name] = "" if available else str(reason)
    found = {
        "version": importlib.metadata.version("transformer_engine"),
        "emulated": te_fsdp.emulation.arch() if emulated else None,
        "recipes": recipes,
        "attention": _attention(),
    }
    print(json.dumps(found))
    return 0


def _attention() -> dict[str, Any]:
    from te_fsdp import _te_modules

    try:
        return {**_te_modules.choice(**_ATTENTION), "shape": _ATTENTION}
    except Exception as error:  # TE asks the device for what an emulation or another version may lack
        return {"backend": "unknown", "reasons": [f"{type(error).__name__}: {error}"], "shape": _ATTENTION}


if __name__ == "__main__":
    sys.exit(main())
