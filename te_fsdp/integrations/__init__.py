"""Thin seams to other frameworks: each module is imported by whoever uses its framework, and imports that.

    fabric         Lightning Fabric: a strategy
    accelerate     Hugging Face accelerate: an Accelerator
    transformers   Hugging Face transformers: a Trainer
    peft           Hugging Face PEFT: LoRA on TransformerEngine's layers
    training_log   numbers of each step for JSON lines, TensorBoard, Weights & Biases
    torchtitan     torchtitan: base class of models, parallelize function, checkpoint manager

What works and what does not is a table for each in docs/integrations.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_fsdp.errors import message


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Context of imports of a framework: where one fails, the error names the extra of pip that brings it.

    Args:
        extra: Its name.

    Raises:
        ImportError: As the import raised it, with the fix.
    """
    try:
        yield
    except ImportError as error:
        text = message(str(error), fix=f"pip install 'te-fsdp[{extra}]', in a checkout '.[{extra}]'")
        raise type(error)(text, name=error.name) from error
