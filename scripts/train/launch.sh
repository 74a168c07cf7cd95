# shellcheck shell=bash
# Sourced by the launchers of the H200 guide: its variables, told to `redline train` in its own words.
# Only what is set is passed on; everything else is the recipe's. Any two of BATCH_SIZE, GRAD_ACCUM and
# GLOBAL_BATCH_SIZE give the third, and three must agree.

# Appends to `words`.
add_variables() {
  [[ -n ${BATCH_SIZE:-} ]] && words+=("train.micro_batch=$BATCH_SIZE")
  [[ -n ${GLOBAL_BATCH_SIZE:-} ]] && words+=("train.global_batch=$GLOBAL_BATCH_SIZE")
  if [[ -n ${GRAD_ACCUM:-} ]]; then
    words+=("train.accumulation=$GRAD_ACCUM")
    # the recipe's own number must not be a third
    if [[ -z ${BATCH_SIZE:-} ]]; then
      words+=("train.micro_batch=auto")
    elif [[ -z ${GLOBAL_BATCH_SIZE:-} ]]; then
      words+=("train.global_batch=auto")
    fi
  fi
  [[ -n ${LR:-} ]] && words+=("train.lr=$LR")
  [[ -n ${WARMUP_STEPS:-} ]] && words+=("train.warmup_steps=$WARMUP_STEPS")
  [[ -n ${SEQ_LEN:-} ]] && words+=("data.seq_len=$SEQ_LEN")
  return 0
}

# The checkout's own, else the one on the PATH.
find_redline() {
  redline="$1/.venv/bin/redline"
  [[ -x $redline ]] && return 0
  redline=$(command -v redline) && return 0
  echo "redline is not installed here: run \`make setup\` in $1." >&2
  exit 1
}

# launch ROOT RECIPE [key=value …] [options of redline train]
launch() {
  local root=$1 recipe=$2 word
  shift 2
  find_redline "$root"
  words=("$recipe")
  add_variables
  for word in "$@"; do
    [[ $word == --resume || $word == --resume=* ]] && words=() # a run has its recipe with it
  done
  set -- ${words[@]+"${words[@]}"} "$@"
  echo "redline train $*" >&2
  exec "$redline" train "$@" # as this process: a signal of the scheduler reaches the run
}
