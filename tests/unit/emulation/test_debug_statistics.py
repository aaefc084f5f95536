"""Run TransformerEngine's tensor statistics (``nvdlfw_inspect``) under the emulation in a separate process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STATISTICS = """
stats:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors_struct:
        - tensor: activation
          stats: [mean, l1_norm, max]
          freq: 1
        - tensor: gradient
          stats: [mean]
          freq: 1
    LogFp8TensorStats:
      enabled: True
      tensors_struct:
        - tensor: activation
          stats: [mse]
          freq: 1
"""

PROGRAM = """
import sys
from pathlib import Path

import te_fsdp.emulation

te_fsdp.emulation.install(arch="9.0")
import nvdlfw_inspect.api as debug_api
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

folder = Path(sys.argv[1])
features = Path(te.__file__).parents[1] / "debug/features"
debug_api.initialize(str(folder / "config.yaml"), feature_dirs=[str(features)], log_dir=str(folder))
module = te.Linear(64, 64, device="cpu", params_dtype=torch.float32)
debug_api.infer_and_assign_layer_names(module)
tokens = torch.randn(32, 64)
with te.autocast(recipe=Float8CurrentScaling()):
    (2 * module(tokens)).sum().backward()
debug_api.step()
print(tokens.mean().item(), tokens.abs().sum().item(), tokens.max().item())
"""


def test_debug_statistics_match_the_tensors(tmp_path):
    """Cover the activation's mean, norm and maximum, the gradient's mean, and the quantization error."""
    pytest.importorskip("nvdlfw_inspect", reason="nvdlfw-inspect is not installed (extra: test)")
    (tmp_path / "config.yaml").write_text(STATISTICS)
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    mean, norm, largest = map(float, done.stdout.split()[-3:])
    log = next(tmp_path.glob("nvdlfw_inspect_statistics_logs/*.log")).read_text()
    results = {name: float(value) for name, value in re.findall(r"INFO - \w+?_(\S+)\s.*value=(\S+)", log)}
    # the log has four decimals; sums are fp32, in a different order
    expected = {
        "activation_mean": mean,
        "activation_l1_norm": norm,
        "activation_max": largest,
        "gradient_mean": 2.0,
    }
    assert {name: results[name] for name in expected} == pytest.approx(expected, abs=1e-3, rel=1e-5)
    assert 0 < results["activation_mse"] < 0.01
