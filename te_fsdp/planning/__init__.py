"""Plans: what a job of any number of GPUs will hold and send, found on one CPU (:mod:`te_fsdp.planning.plan`).

import te_fsdp.planning as planning
job = planning.Job("my-llama", strategy="optim_grads_params", optimizer="fused-adam", sequence=8192)
found = planning.plan(job, planning.Sizes(dp_shard=32, tp=2))
print(found.peak.bytes, found.sent())
best = planning.search(job, gpus=64, memory=80 * 2**30)
"""

from __future__ import annotations

from te_fsdp.planning.job import OPTIMIZERS, RECIPES, Job, Sizes
from te_fsdp.planning.peak import Peak
from te_fsdp.planning.plan import LINK_RATIO, Candidate, Plan, plan, search
from te_fsdp.planning.time import Machine, StepTime, Traffic

__all__ = [
    "LINK_RATIO",
    "OPTIMIZERS",
    "RECIPES",
    "Candidate",
    "Job",
    "Machine",
    "Peak",
    "Plan",
    "Sizes",
    "StepTime",
    "Traffic",
    "plan",
    "search",
]
