#!/usr/bin/env bash
#SBATCH --job-name=gsm8k-bd3lm
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@180
# Train BD3-LM on GSM8K with the settings of the H200 guide:
#   bash scripts/train/train_gsm8k_bd3lm_h200.sh [key=value …]   (or with sbatch)
#   BATCH_SIZE=64 bash scripts/train/train_gsm8k_bd3lm_h200.sh   smaller micro-batches, the same global batch
# Further variables: GRAD_ACCUM (4: GLOBAL_BATCH_SIZE / BATCH_SIZE), WARMUP_STEPS (5000), SEQ_LEN (512), NUM_WORKERS (2,
# because batches come from a memory map), WANDB=PROJECT (off). Presets: train.preset=conservative|recommended|aggressive|extreme,
# which scale the batch; the learning rate is then 3e-4·√(global batch / 128).
set -euo pipefail

# The guide's settings. Edit a line here, or set the environment variable for one run. The guide's learning rates: 3e-4 for a global
# batch of 128, 4e-4 for 256, 5e-4 for 512, 7e-4 for 1024.
# shellcheck disable=SC2034 # read by launch.sh
settings=(
  BATCH_SIZE=128
  GLOBAL_BATCH_SIZE=512
  LR=5e-4
)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
# sbatch runs a copy of this file from its spool folder; the checkout is then the folder it was submitted from.
[[ -f $root/scripts/train/launch.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -f $root/scripts/train/launch.sh ]]; then
  echo "$root has no scripts/train/launch.sh. Submit this script from the checkout." >&2
  exit 1
fi
# shellcheck source=scripts/train/launch.sh
source "$root/scripts/train/launch.sh"

launch "$root" gsm8k-bd3lm "$@"
