#!/usr/bin/env bash
# Times the batch loop on one large GPU that has no network, in about four minutes: scripts/gpu_check.py, see there.
#
# For a GPU machine that is lent for minutes, with Python 3.12 and a torch with CUDA in its image. Nothing is fetched:
# what the image lacks comes as wheels in a folder.
#
#   here                bash scripts/gpu_check.sh wheels gpu_parts/wheels        downloads them, once
#   on the GPU machine  bash scripts/gpu_check.sh run "$OUT" gpu_parts/wheels    (allow 300 s)
#                       bash scripts/gpu_check.sh test "$OUT" gpu_parts/wheels   the tests marked `gpu`
#
# Results are written after each configuration, so OUT holds what was reached whenever this ends.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: gpu_check.sh wheels FOLDER                  download wheels of transformers and of what it needs to FOLDER
       gpu_check.sh run OUT [WHEELS] [OPTION...]   measure; OPTIONs are those of gpu_check.py, e.g. --no-compile
       gpu_check.sh test OUT [WHEELS] [OPTION...]  the tests that need a GPU; OPTIONs are those of pytest, e.g. -x
                                                   without WHEELS $PYTHON runs with the packages that it has

Environment:
  wheels     PYTHON=python3  TARGET_PYTHON=3.12
  run, test  PYTHON=python3  LIMIT_S=280 in all, the environment included; GRACE_S=10 to stop in
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}

# What the image lacks or has in another version, at the versions of constraints.txt. Not torch and numpy: the image's
# own fit together and to its driver.
WHEELS="transformers tokenizers safetensors huggingface_hub hf-xet accelerate typer rich click shellingham
  annotated-doc markdown-it-py mdurl Pygments httpx2 httpcore2 truststore anyio idna h11 certifi filelock fsspec
  packaging psutil PyYAML regex typing_extensions tqdm pytest pytest-timeout pluggy iniconfig"

# Packages of the image that transformers would import because they are there; made for another transformers they may
# fail to load.
HIDDEN="peft sklearn torchvision torchaudio jax jaxlib flax tensorboard sentence_transformers"

die() {
  echo "gpu_check.sh: $*" >&2
  exit 1
}

wheels() {
  local folder=$1 name version requirements=() platforms=()
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
  # `pip` comes along unpinned: the image's may lie where a new environment does not see it.
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --progress-bar off \
    --python-version "${TARGET_PYTHON:-3.12}" "${platforms[@]}" --dest "$folder" "${requirements[@]}" pip
  du -sh "$folder"
}

# An environment that sees the image's packages behind those of WHEELS; prints its Python.
environment() { # FOLDER WHEELS
  local venv=$1 wheels=$2 packages
  compgen -G "$wheels/transformers-*.whl" >/dev/null || die "$wheels holds no wheel of transformers"
  compgen -G "$wheels/pip-*.whl" >/dev/null || die "$wheels holds no wheel of pip"
  "$PYTHON" -m venv --system-site-packages --without-pip "$venv"
  packages=$(echo "$venv"/lib/python3*/site-packages)
  # Where $PYTHON is itself a virtual environment, "system" means the Python below it; torch lies in $PYTHON's own.
  {
    printf 'import sys; sys.modules.update(dict.fromkeys("%s".split()))\n' "$HIDDEN"
    "$PYTHON" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
  } >"$packages/of_the_image.pth"
  # The image's pip may be told to hold packages at the image's versions.
  env -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null PYTHONPATH="$(echo "$wheels"/pip-*.whl)" "$venv/bin/python" -m pip \
    install --quiet --no-index --no-deps --ignore-installed --no-compile --disable-pip-version-check \
    "$wheels"/*.whl >&2
  echo "$venv/bin/python"
}

run() { # check|test OUT [WHEELS] [OPTION...]
  local what=$1 out=$2 wheels="" python=$PYTHON left status=0 command
  shift 2
  if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    wheels=$1
    shift
  fi
  mkdir -p "$out"
  if [ -n "$wheels" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    python=$(environment "$WORK/venv" "$wheels") || die "the environment could not be made; see above"
  fi
  left=$((${LIMIT_S:-280} - SECONDS))
  [ "$left" -gt 0 ] || die "no time is left of ${LIMIT_S:-280} s"
  export PYTHONPATH=$ROOT/src PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  command=("$ROOT/scripts/gpu_check.py" --output "$out")
  [ "$what" = check ] || command=(-m pytest -q -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -p no:cacheprovider -m gpu
    "$ROOT/tests/gpu")
  timeout --signal=INT --kill-after="${GRACE_S:-10}" "$left" "$python" "${command[@]}" "$@" 2>&1 |
    tee "$out/gpu_$what.log" || status=$?
  echo "gpu_check.sh: $SECONDS s, exit code $status; results in $out" | tee -a "$out/gpu_$what.log"
  return "$status"
}

case "${1:-}:$#" in
  wheels:2) wheels "$2" ;;
  run:1 | test:1)
    usage >&2
    exit 2
    ;;
  run:*) run check "${@:2}" ;;
  test:*) run test "${@:2}" ;;
  -h:1 | --help:1 | help:1) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
