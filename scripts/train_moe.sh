#!/usr/bin/env bash
# The mixture of experts, shown end to end: the same training on several meshes, and a checkpoint resumed at another ep
# size; then all losses in one plot. Run through `make train-moe`.
#
#   usage: scripts/train_moe.sh PYTHON [example options...]
#
#   OUT=...    where logs, plots and checkpoints go (default: out/train-moe); older runs there are removed
#   NODES=...  pretend that this machine's GPUs are so many nodes of them each (default: 1): 4 ranks on 2 GPUs
#   STEPS=...  steps of each training (default: 60 on CPU, 400 on GPUs); the checkpoint is from half way
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
out=${OUT:-out/train-moe}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

gpus=0 nodes=${NODES:-1}
if [ -z "${TE_FSDP_EMULATION:-}" ]; then
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
fi

if ((gpus == 0)); then
  echo "train-moe: no GPU in use: up to eight processes on the CPU, TransformerEngine emulated, gloo"
  export TE_FSDP_EMULATION=${TE_FSDP_EMULATION:-10.0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=
  steps=${STEPS:-60} size="--batch 16"
  ranks=4 third="8 --ep 2 --tp 2"
elif ((gpus * nodes >= 4)); then
  echo "train-moe: 4 ranks on $gpus GPUs ($nodes pretended nodes), TransformerEngine as installed, NCCL"
  steps=${STEPS:-400} size="--batch 32 --seq 512 --hidden 512 --ffn 1024 --megabytes 20"
  ranks=4 third="4 --ep 2 --tp 2"
else
  echo "train-moe: error: $gpus GPU(s); this wants 4. With 2: NODES=2. On the CPU: TE_FSDP_EMULATION=10.0" >&2
  exit 1
fi
half=$((steps / 2))

run() {
  local name=$1 processes=$2
  shift 2
  local launcher="-m torch.distributed.run --standalone --nproc-per-node $processes"
  if ((nodes > 1 && processes > 1)); then
    launcher="scripts/torchrun_nodes.py $nodes $((processes / nodes))"
  fi
  echo "+ $launcher examples/fsdp2_tp/train_moe.py $*"
  # shellcheck disable=SC2086
  "$python" $launcher examples/fsdp2_tp/train_moe.py --out "$out/$name" "$@" | tee "$out/$name.log"
}

rm -rf "$out"
mkdir -p "$out"
# shellcheck disable=SC2086
{
  run one 1 $size --steps "$steps" "$@"
  run ep2 "$ranks" --ep 2 $size --steps "$steps" --save "$out/checkpoints" --save-every "$half" "$@"
  run ep2-tp2 $third $size --steps "$steps" "$@"
  run ep4 "$ranks" --ep 4 $size --steps "$steps" --resume "$out/checkpoints/step-$half" "$@"
  run back 1 $size --steps "$steps" --resume "$out/checkpoints/step-$half" "$@"
}
"$python" scripts/moe_losses.py "$out" "$out/losses"
echo "train-moe: done; see $out"
