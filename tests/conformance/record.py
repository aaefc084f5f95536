"""Record what TransformerEngine computes for every case.

On a machine with an NVIDIA GPU and the real TransformerEngine:

    python -m tests.conformance.record golden.full.xz --packed golden.xz

`golden.full.xz` is for inspecting differences: it contains every output, the longest ones as samples. `golden.xz` is
the file for the repository, in which long outputs that must be equal bit for bit are digests, and others samples.
A case that raises is recorded with its message. With `--emulated 9.0` the emulation is recorded instead: a test of
this script, never a reference.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.conformance import golden

#: Processes that may die before the rest is given up; quantization of shapes such as (64, 0) kills 16 of them.
MOST_RESTARTS = 80
#: Seconds for all cases in one process.
PATIENCE = 240


def _about(device: str, emulated: str | None) -> dict[str, Any]:
    import torch
    import transformer_engine

    about = {
        "transformer_engine": str(transformer_engine.__version__),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "emulated": emulated,
    }
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
        about["capability"] = list(torch.cuda.get_device_capability())
        about["cuda"], about["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return about


def _one(case: Any, env: Any) -> golden.Recorded:
    from tests.conformance.case import run_case

    try:
        outputs, inputs = run_case(case, env)
        return {"inputs": inputs, "outputs": outputs}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"[:400]}


def _work(device: str, only: str, first: int, folder: Path) -> None:
    """Run the cases from number `first`, one file each. Ends early if the device fails."""
    import torch

    from tests.conformance.case import every_case
    from tests.conformance.inputs import Env

    env = Env(device)
    torch.save(_about(device, None), folder / "about")
    for number, case in enumerate(every_case()):
        if number < first or not case.name.startswith(only):
            continue
        recorded = _one(case, env)
        torch.save({case.name: recorded}, folder / f"{number}.part")
        (folder / f"{number}.part").rename(folder / f"{number}")
        if device == "cuda" and "raised" in recorded:
            try:
                torch.cuda.synchronize()
                torch.ones(1, device=device).sum().item()
            except RuntimeError as error:
                print(f"the device is lost after {case.name}: {error}", flush=True)
                os._exit(3)


def record(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, golden.Recorded]]:
    """Run the cases in a separate process, and resume in a new one after a crash."""
    import torch

    from tests.conformance.case import every_case

    names = [case.name for case in every_case()]
    wanted = [number for number, name in enumerate(names) if name.startswith(options.only)]
    recorded: dict[str, golden.Recorded] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = wanted[0]
        for _ in range(MOST_RESTARTS):
            command = [sys.executable, "-m", "tests.conformance.record", folder, "--only", options.only]
            command += ["--first", str(first)] + (
                ["--emulated", options.emulated] if options.emulated else []
            )
            try:
                code = subprocess.run(command, check=False, timeout=PATIENCE).returncode
            except subprocess.TimeoutExpired:
                code = -1
            missing = [
                number for number in wanted if number >= first and not Path(folder, str(number)).exists()
            ]
            if not missing:
                break
            first = missing[0]
            if code != 3:  # it died within this case
                recorded[names[first]] = {"raised": f"the process died, exit status {code}"}
                first += 1
        for number in wanted:
            if Path(folder, str(number)).exists():
                recorded |= torch.load(Path(folder, str(number)))
            recorded.setdefault(names[number], {"raised": "not run: too many restarts"})
        about = torch.load(Path(folder, "about"))
    return {**about, "emulated": options.emulated}, {
        names[number]: recorded[names[number]] for number in wanted
    }


def _summary(recorded: dict[str, golden.Recorded]) -> None:
    total, raised = collections.Counter(), collections.Counter()
    for name, case in recorded.items():
        total[name.split("/")[0]] += 1
        if "raised" in case:
            raised[name.split("/")[0]] += 1
            print(f"raised: {name}: {case['raised'][:200]}")
    for kind, count in total.items():
        print(f"{kind}: {count} cases, {raised[kind]} raised")
    print(f"{sum(total.values())} cases, {sum(raised.values())} raised")


def main() -> None:
    """Run the command line of the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("full", type=Path, help="file with all of it")
    parser.add_argument("--packed", type=Path, help="file for the repository")
    parser.add_argument("--emulated", metavar="ARCH", help="record the emulation (a self-test)")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only cases whose name starts with this")
    options = parser.parse_args()
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_TORCH_COMPILE="0")
    if options.emulated:
        import te_fsdp.emulation

        te_fsdp.emulation.install(options.emulated)
    import torch

    from tests.conformance.case import every_case

    device = "cpu" if options.emulated else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: run on a machine with one, or with --emulated 9.0")
    if options.first is not None:
        _work(device, options.only, options.first, options.full)
        return
    start = time.time()
    about, recorded = record(options)
    _summary(recorded)
    full = golden.pack(recorded, lambda name, key: False, short=32768, samples=6000)
    golden.write(options.full, about, full)
    if options.packed:
        bounds = {case.name: case for case in every_case()}
        packed = golden.pack(recorded, lambda name, key: bounds[name].bound_of(key).exact)
        golden.write(options.packed, about, packed)
        print(f"{options.packed}: {options.packed.stat().st_size} bytes")
    print(f"{options.full}: {options.full.stat().st_size} bytes, {time.time() - start:.1f} s, {about}")


if __name__ == "__main__":
    main()
