#!/usr/bin/env bash
# The figures of the docs that need a GPU, part by part, each with a limit in seconds; what a part finds lies in OUT.
#
#   benchmarks/suite.sh OUT PART …
#
# tests      every test that needs a GPU, by name
# throughput tokens/s of the 350M recipe, beside the compiled step and transformers' Llama
# startup    from the command to the first step, bf16 and fp8
# diffusion  tokens/s of block diffusion, fused and compiled
# plans      SOCRATIC=train_socratic.jsonl: of plans, beside masks that are dense; fused and compiled
# band       TOKENS=folder: whether hand-written blocks learn what compiled ones do: gradients beside float32, ten seeds
# memory     SOCRATIC: the H200 guide's presets, planned and measured
# latent     a latent prefix beside the textbook loop
# finetune   an 8B shape beside the usual stack
# packed     pretraining on rows of several documents
# base       BASE=model.gguf GSM8K=train.jsonl TEST=test.jsonl: a real model fine-tuned in bf16 and in fp8, and what it answers
# problems   word problems: plans and plain blocks side by side, and how many are answered rightly
# gsm8k      SOCRATIC, TEST: plans learnt for MINUTES (5), alone and with hard problems, and how many are answered rightly
# squad      BASE, SQUAD=squad.json: a latent prefix on real questions
# wire       BASE: a latent prefix on word problems
# muon       one update of Muon, by parts
# bounds     TOKENS: −log p by block size; goes on from OUT/bounds.json
# tune       TOKENS: trials of the race to a loss; goes on from OUT/tune.json
# parts      TOKENS: what each part is worth in that race; goes on from OUT/parts.json
# decide     TOKENS: trials of pretrain-350m with AdamW in bf16, the arm that decides (goes on from OUT/tune.json); with ADAMW="the words that
#            won": that arm in the race, three seeds of two minutes
# race       TOKENS: the race itself with what won its trials, three seeds of two minutes and one of eight; goes on from OUT/race.json
#
# GPT-2's tokenizer, where a part needs it: REDLINE_GPT2=folder of its tokenizer.json.
set -uo pipefail
out=${1:?folder}; shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1
began=$SECONDS

limited() { # NAME SECONDS COMMAND …
    local name=$1 limit=$2; shift 2
    local code=0
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$code" >"$out/$name.exit"
    echo "== $name: exit $code after $((SECONDS - began)) s"
}
redline() { python3 -m redline "$@"; }
export -f redline
bench() { # NAME SECONDS WORDS …
    local name=$1 limit=$2; shift 2
    limited "$name" "$limit" python3 -m benchmarks "$@" --out "$out/$name.json"
    tail -n 8 "$out/$name.log" | cut -c1-200
}
NORMUON=(train.optimizer=normuon train.muon_lr=0.02 train.lr=2e-3 train.schedule=wsd train.min_lr_ratio=0.0)
last_losses() { # RUN: of the evaluations
    grep '"type": *"eval"' "$1/events.jsonl" | tail -n 3 | cut -c1-240
}

for part in "$@"; do
    case $part in
    tests)
        limited tests 420 python3 -m pytest tests/gpu tests/kernels tests/jobs -m gpu -n ${WORKERS:-8} -o addopts= -v \
            -p no:cacheprovider --timeout=150 --tb=short
        grep -E "FAILED|ERROR|passed|failed" "$out/tests.log" | sort -u | cut -c1-160
        ;;
    throughput)
        bench throughput 330 throughput train.steps=25
        ;;
    startup)
        limited startup 90 python3 -m redline bench startup --out "$out/startup.json"
        limited startup-fp8 110 python3 -m redline bench startup train.precision=fp8 --out "$out/startup-fp8.json"
        ;;
    diffusion)
        bench diffusion-fused 160 throughput owt-bd3lm train.steps=20 train.global_batch=128 model.kernels=fused --only redline
        bench diffusion 200 throughput owt-bd3lm train.steps=20 train.global_batch=128 --only redline
        ;;
    plans)
        words=(gsm8k-hdp train.steps=20 train.global_batch=128 data.source="${SOCRATIC:?a train_socratic.jsonl}")
        bench plans-fused 80 throughput "${words[@]}" model.kernels=fused --only redline
        bench plans 220 throughput "${words[@]}"
        ;;
    band)
        limited gradients 150 python3 -m benchmarks.studies.gradients "$out/gradients.json" "${TOKENS:?a folder of tokens}"
        for way in "compiled, cuDNN" "compiled, flash" fused; do
            limited "seeds-${way//[ ,]/}" 280 python3 -m benchmarks.studies.seeds "$out/seeds" "$TOKENS" "$way" &
        done
        wait
        cat "$out/gradients.log"
        python3 -m benchmarks.studies.seeds "$out/seeds"
        ;;
    memory)
        for micro in 64 128 192 256; do
            bench "memory-$micro" 70 plan-accuracy gsm8k-hdp train.micro_batch=$micro train.global_batch=$((4 * micro)) \
                data.source="${SOCRATIC:?a train_socratic.jsonl}"
        done
        ;;
    latent) bench latent 240 latent train.steps=10 ;;
    finetune) bench finetune 420 finetune train.steps=8 ;;
    packed) bench packed 120 throughput data.pack=true train.steps=20 --only redline ;;
    base)
        for precision in bf16 fp8; do
            limited "base-$precision" 240 python3 -m redline train qlora-smollm2 model.base="${BASE:?a model.gguf}" data.source="${GSM8K:?a train.jsonl}" \
                train.device=cuda train.precision=$precision train.steps=200 train.global_batch=32 eval.every=50 \
                eval.samples=0 --run "$out/base-$precision" &
        done
        wait
        for precision in bf16 fp8; do last_losses "$out/base-$precision"; done
        for model in "$BASE" "$out/base-bf16"; do
            limited "answers-$(basename "$model")" 120 python3 -m redline eval "$model" --answers gsm8k --data "${TEST:?a test.jsonl}" --questions 200 &
        done
        wait
        grep -hE "exact_match|right" "$out"/answers-*.log
        ;;
    problems)
        for recipe in problems-hdp problems-bd3lm; do
            limited "$recipe" 300 bash -c "redline train $recipe train.device=cuda data.source=problems:easy:200000 \
                model.layers=6 model.d_model=256 train.global_batch=256 train.steps=2000 eval.every=500 \
                --run $out/$recipe && redline eval $out/$recipe --answers gsm8k --data problems:easy:400@test --questions 300" &
        done
        wait
        tail -n 4 "$out"/problems-*.log
        ;;
    gsm8k)
        words="train.device=cuda train.steps=null train.hours=${MINUTES:-5}m train.global_batch=128 train.warmup_steps=100 \
            train.ema=0.999 model.init=zero eval.every=500 checkpoint.every=100000 ${NORMUON[*]}"
        for arm in ${ALONE:+"gsm8k $SOCRATIC"} "gsm8k-and-problems [$SOCRATIC,problems:hard:7500]"; do
            read -r name source <<<"$arm"
            limited "$name" 560 bash -c "redline train gsm8k-hdp data.source='$source' $words --run $out/$name && \
                redline eval $out/$name@best --answers gsm8k --data ${TEST:?a test.jsonl} --questions 300" &
        done
        wait
        grep -hE "^after|exact_match|forwards_per|  loss" "$out"/gsm8k*.log
        ;;
    squad)
        limited squad 420 python3 -m benchmarks.studies.latent_squad "$out/squad.json" "${SQUAD:?a squad.json}" "${BASE:?a model.gguf}" "${NORMUON[@]}"
        tail -n 8 "$out/squad.log"
        ;;
    wire)
        limited wire 400 bash -c "redline train latentwire-problems model.base=${BASE:?a model.gguf} --run $out/wire &&
            redline eval $out/wire@best --answers f1 --data problems:easy:400@test --questions 300"
        tail -n 18 "$out/wire.log"
        ;;
    muon) limited muon 60 python3 -m benchmarks.studies.muon "$out/muon.json"; tail -n 20 "$out/muon.log" ;;
    bounds)
        limited bounds 500 python3 -m benchmarks.studies.bounds "$out/bounds.json" "${TOKENS:?a folder of tokens}" --at-once 4
        tail -n 8 "$out/bounds.log"
        ;;
    tune)
        limited tune "${LIMIT:-560}" python3 -m benchmarks.studies.tune_race "$out/tune.json" "${TOKENS:?a folder of tokens}" --at-once 3
        cat "$out/tune.log"
        ;;
    parts)
        limited parts "${LIMIT:-560}" python3 -m benchmarks.studies.tune_race "$out/parts.json" "${TOKENS:?a folder of tokens}" --parts --at-once 3
        cat "$out/parts.log"
        ;;
    decide)
        limited tune "${LIMIT:-560}" python3 -m benchmarks.studies.tune_race "$out/tune.json" "${TOKENS:?a folder of tokens}" --at-once 3 --adamw
        cat "$out/tune.log"
        # shellcheck disable=SC2086 # words, not a word
        [[ -z ${ADAMW:-} ]] || bench race "${LIMIT:-2400}" time-to-loss "data.source=$TOKENS" --arm pretrain-350m-adamw $ADAMW --budget 120 \
            --seed 1337,1338,1339
        ;;
    race)
        [[ -d /dev/shm ]] && export TMPDIR=/dev/shm # where each arm's last checkpoint is written, and deleted
        ours="train.optimizer=normuon train.muon_lr=0.01 train.muon_momentum=0.9 train.lr=1.2e-2 train.betas=[0.7,0.998] train.weight_decay=0 \
            train.global_batch=16 train.precision=fp8 train.graph=true model.init=zero model.embedding_std=0.005 \
            train.schedule=wsd train.decay_fraction=0.6 train.min_lr_ratio=0.0"
        for arm in "120 1337,1338,1339 nanogpt train.lr=6e-4 train.global_batch=16 train.warmup_steps=280" \
            "24 1337,1338,1339 pretrain-350m $ours train.warmup_steps=56" "6 1337,1338,1339 speedrun-50m train.warmup_steps=20" \
            "82 1337 pretrain-350m $ours" "24 1337 speedrun-50m train.warmup_steps=20" \
            "480 1337 nanogpt train.lr=6e-4 train.global_batch=16 train.warmup_steps=280"; do
            read -r budget seeds name words <<<"$arm"
            # shellcheck disable=SC2086 # words, not a word
            bench race "${LIMIT:-2400}" time-to-loss "data.source=${TOKENS:?a folder of tokens}" --arm "$name" $words --budget "$budget" --seed "$seeds"
        done
        ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
    esac
done
