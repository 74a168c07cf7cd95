#!/usr/bin/env bash
#SBATCH --job-name=gsm8k-hdp
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@180
# HDP-Diffusion on GSM8K, as in the H200 guide:
#   bash scripts/train/train_hdp_diffusion_h200.sh [key=value …]   or the same with sbatch
#   BATCH_SIZE=64 bash scripts/train/train_hdp_diffusion_h200.sh   smaller micro-batches, the same global batch
# Variables: BATCH_SIZE (128), GLOBAL_BATCH_SIZE (512), GRAD_ACCUM (4), WARMUP_STEPS (5000), SEQ_LEN (512), and LR, which
# is 3e-4·√(global batch / 128) if not set: 6e-4 at 512. Presets: train.preset=conservative|recommended|aggressive|extreme.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
# sbatch runs a copy of this file: then the checkout is where it was submitted
[[ -f $root/scripts/train/launch.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -f $root/scripts/train/launch.sh ]]; then
  echo "there is no scripts/train/launch.sh in $root: submit this from the checkout." >&2
  exit 1
fi
# shellcheck source=scripts/train/launch.sh
source "$root/scripts/train/launch.sh"

launch "$root" gsm8k-hdp "$@"
