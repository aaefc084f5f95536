#!/usr/bin/env bash
# Train on one mesh, save in the middle, resume on a different mesh, compare with the uninterrupted run. Run by `make train`.
#
#   usage: scripts/train.sh PYTHON [example options...]
#
#   OUT=...    folder of logs, plots and checkpoints (default: out/train); older checkpoints there are removed
#   STEPS=...  steps before and after the checkpoint (default: 20 on CPU, 100 on GPUs)
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
out=${OUT:-out/train}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Number of GPUs, and the first one's capability without the dot (float8 begins with 89).
gpus=0 capability=0
if [ -z "${TE_FSDP_EMULATION:-}" ]; then
  read -r gpus capability < <("$python" -c 'import torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(n, "%d%d" % torch.cuda.get_device_capability() if n else 0)')
fi

# "processes mesh options" of the first run and of the resumed one; both divide the batch.
if ((gpus == 0)); then
  echo "train: no GPU in use: four processes on the CPU, TransformerEngine emulated, gloo"
  export TE_FSDP_EMULATION=${TE_FSDP_EMULATION:-10.0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=
  first="4 --dp-shard 2 --tp 2" second="4 --dp-shard 4 --tp 1"
  batch=16 steps=${STEPS:-20} recipe=current
else
  echo "train: $gpus GPU(s), TransformerEngine as installed, NCCL"
  steps=${STEPS:-100}
  if ((capability >= 89)); then recipe=current; else recipe=none; fi
  if ((gpus == 1)); then
    first="1 --dp-shard 1 --tp 1" second="1 --dp-shard 1 --tp 1" batch=16
  elif ((gpus % 2 == 0)); then
    first="$gpus --dp-shard $((gpus / 2)) --tp 2" second="$gpus --dp-shard $gpus --tp 1" batch=$((4 * gpus))
  else
    # An odd number of GPUs does not split into pairs: one stays idle when tensor parallelism comes in.
    first="$gpus --dp-shard $gpus --tp 1" second="$((gpus - 1)) --dp-shard $((gpus / 2)) --tp 2"
    batch=$((gpus * (gpus / 2) * 2))
  fi
fi
# FP8 weights with FP32 main weights where the GPU has FP8, two microbatches, clipping, warmup and cosine decay.
weights="--optimizer fused_adam"
if [ "$recipe" != none ]; then weights+=" --quantized-weights"; fi
common="--recipe $recipe $weights --batch $batch --micro 2 --clip 1.0 --warmup $((steps / 4)) --decay $((2 * steps)) --lr 3e-3 --steps $((2 * steps))"

run() {
  local processes=$1
  shift
  echo "+ torchrun --standalone --nproc-per-node $processes examples/fsdp2_tp/train.py $*"
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" examples/fsdp2_tp/train.py "$@"
}

rm -rf "$out/checkpoints"
mkdir -p "$out"
# shellcheck disable=SC2086
run $first $common --out "$out/uninterrupted" --save "$out/checkpoints" --save-every "$steps" "$@"
# shellcheck disable=SC2086
run $second $common --out "$out" --resume "$out/checkpoints/step-$steps" --reference "$out/uninterrupted" "$@"
echo "train: done; a run resumed on a different mesh next to the uninterrupted one: $out/loss.png"
