# shellcheck shell=bash
# Sourced by the launchers of the H200 guide. Translates the guide's variables into recipe keys of `redline train`.
# An environment variable wins over the launcher's `settings`, and a key=value on the command line wins over both; all
# other values are the recipe's. Any two of BATCH_SIZE, GRAD_ACCUM and GLOBAL_BATCH_SIZE determine the third; if all three
# are set, they must agree.

# use_settings NAME=VALUE … : set the variables that the environment does not set.
# A setting is left out if it would contradict the environment: the batch size if GRAD_ACCUM is set, and the learning rate
# if the global batch differs from the setting (it is then 3e-4·√(global batch / 128)).
use_settings() {
  local setting name value usual='' total=${GLOBAL_BATCH_SIZE:-} batch=${BATCH_SIZE:-} accumulation=${GRAD_ACCUM:-}
  [[ -z $total && $batch =~ ^[0-9]+$ && $accumulation =~ ^[0-9]+$ ]] && total=$((10#$batch * 10#$accumulation))
  for setting in "$@"; do
    name=${setting%%=*} value=${setting#*=}
    [[ $name == GLOBAL_BATCH_SIZE ]] && usual=$value
    [[ -n ${!name:-} ]] && continue
    case $name in
      BATCH_SIZE) [[ -n $accumulation ]] && continue ;;
      GLOBAL_BATCH_SIZE) [[ -n $batch && -n $accumulation ]] && continue ;;
      LR) [[ -n $total && $total != "$usual" ]] && continue ;;
    esac
    printf -v "$name" %s "$value"
  done
  return 0
}

# Append recipe keys for the variables to the array `words`.
add_variables() {
  [[ -n ${BATCH_SIZE:-} ]] && words+=("train.micro_batch=$BATCH_SIZE")
  [[ -n ${GLOBAL_BATCH_SIZE:-} ]] && words+=("train.global_batch=$GLOBAL_BATCH_SIZE")
  if [[ -n ${GRAD_ACCUM:-} ]]; then
    words+=("train.accumulation=$GRAD_ACCUM")
    # The recipe sets the third number itself, which could contradict these two.
    if [[ -z ${BATCH_SIZE:-} ]]; then
      words+=("train.micro_batch=auto")
    elif [[ -z ${GLOBAL_BATCH_SIZE:-} ]]; then
      words+=("train.global_batch=auto")
    fi
  fi
  [[ -n ${LR:-} ]] && words+=("train.lr=$LR")
  [[ -n ${WARMUP_STEPS:-} ]] && words+=("train.warmup_steps=$WARMUP_STEPS")
  [[ -n ${SEQ_LEN:-} ]] && words+=("data.seq_len=$SEQ_LEN")
  [[ -n ${NUM_WORKERS:-} ]] && words+=("data.workers=$NUM_WORKERS")
  [[ -n ${WANDB:-} ]] && words+=("monitor.wandb=$WANDB")
  return 0
}

# Set `redline` to the command of the checkout, or else to the one on the PATH.
find_redline() {
  redline="$1/.venv/bin/redline"
  [[ -x $redline ]] && return 0
  redline=$(command -v redline) && return 0
  echo "redline is not installed. Run \`make setup\` in $1." >&2
  exit 1
}

# launch ROOT RECIPE [key=value …] [options of redline train]; reads the launcher's array `settings`
launch() {
  local root=$1 recipe=$2 word preset=
  shift 2
  find_redline "$root"
  for word in "$@"; do
    [[ $word == train.preset=* ]] && preset=yes # a preset scales the recipe's batch, which the settings would fix
  done
  # shellcheck disable=SC2154 # set by the launcher
  [[ -n $preset ]] || use_settings "${settings[@]}"
  words=("$recipe")
  add_variables
  for word in "$@"; do
    [[ $word == --resume || $word == --resume=* ]] && words=() # a resumed run has its recipe in its lock
  done
  set -- ${words[@]+"${words[@]}"} "$@"
  echo "redline train $*" >&2
  exec "$redline" train "$@" # exec: the scheduler sends its signals to this process
}
