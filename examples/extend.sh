#!/usr/bin/env bash
# Fine-tune a model at a short window, with gates and without, on the same text in the same order; then measure its
# perplexity far beyond the context it was made for. What is done is not done again.
#
#     bash examples/extend.sh MODEL CORPUS RUNS [SCHEME...]
#
# MODEL is a directory of a rotary model, CORPUS what `gape data prepare --tokenizer MODEL` wrote. A SCHEME is rope (the
# model as it is), p-rope or yarn, with or without +gape. After it, _floorN stands for gates with a floor N in all heads,
# and _floorsNAME for the floors in floorsNAME.json, in the directory FLOORS (./floors), lists of numbers by layer. Any
# other _NAME only tells runs apart. NATIVE is the context that the model was made for (8192), which is T for yarn; LENGTH
# is the window of the fine-tune (1024), T for the others. FACTOR is that of YaRN in place of FAR / NATIVE. GATES has more
# options of `gape hf inject` for schemes with gates, such as GATES="--gate learn_landmark=false". For a try on a CPU:
# LENGTH=64 STEPS=20 BATCH=2 NATIVE=128 FAR=512 CONTEXTS=64,512 LAST=32.
set -euo pipefail
model=$1 corpus=$2 runs=$3
shift 3
[ $# -gt 0 ] || set -- rope+gape rope yarn p-rope+gape p-rope
gape=${GAPE:-gape}
length=${LENGTH:-1024} native=${NATIVE:-8192} far=${FAR:-65536}
factor=${FACTOR:-$((far / native))}
train="--length $length --steps ${STEPS:-600} --batch-size ${BATCH:-32} --learning-rate ${RATE:-3e-4} --gate-rate 10
    --warmup ${WARMUP:-30} --validate-every ${VALIDATE:-100} --checkpoint-every 0 --seed ${SEED:-0} ${TRAIN:-}"
# Every context is scored on the same tokens: those that the longest can precede.
read="--contexts ${CONTEXTS:-1024,2048,4096,8192,16384,32768,65536} --last ${LAST:-512} --align $far
    --max-windows ${WINDOWS:-60} --chunk $far ${READ:-}"

# begin NAME POSITION: the model that a run starts from, as a directory.
begin() {
    local place="$runs/begin/$1" options
    [ "$1" = rope ] && { echo "$model"; return; }
    options="--position $2 --context-length $length"
    # Gates alone leave the model's own rotation in place; YaRN stretches the context the model was made for.
    [ "$2" = rope+gape ] && options="--context-length $length"
    [ "${2%+gape}" = yarn ] && options="--position $2 --context-length $native --option factor=$factor"
    case ${1#*_} in
        floors*) options="$options --floors ${FLOORS:-floors}/${1#*_}.json" ;;
        floor* | *_floor*) options="$options --gate gate_floor=${1#*_floor}" ;;
    esac
    [ "${2%+gape}" = "$2" ] || options="$options ${GATES:-}"
    [ -e "$place/config.json" ] || $gape hf inject "$model" $options --start paper --out "$place" >&2 || return
    echo "$place"
}

for name in "$@"; do
    position=${name%%_*} variant=${name#"${name%%_*}"}
    if [ ! -e "$runs/$name/run.json" ]; then
        # On a line of its own: there a failure ends the script.
        start=$(begin "$name" "$position")
        $gape hf finetune "$start" "$corpus" --out "$runs/$name" --variant "${variant#_}" $train
    fi
    $gape hf perplexity "$runs/$name" --data "$corpus" $read
done
[ -n "${NOBASE:-}" ] || $gape hf perplexity "$model" --data "$corpus" $read
