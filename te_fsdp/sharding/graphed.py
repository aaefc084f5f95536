"""Re-export :mod:`te_fsdp.features.graphed_step` at its earlier public path."""

from te_fsdp.features.graphed_step import (
    GraphedStep as GraphedStep,
    StepOutput as StepOutput,
    graphed_step as graphed_step,
)
