#!/usr/bin/env bash
# One command on a fresh machine: installs into .venv, then runs the demo.
#
#   bash launch/local.sh [synthq flags]        the demo, e.g. --gin.EPSILON=3
#   bash launch/local.sh test [pytest flags]   the tests, e.g. -m "not slow"
#
# Works from any folder and goes on with a .venv that is there. PYTHON names the
# interpreter to make it with, WORKDIR the folder of the demo (runs/demo).
set -euo pipefail

readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly VENV="$ROOT/.venv"
readonly IS_SUPPORTED='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'

fail() {
  echo "launch/local.sh: $*" >&2
  exit 2
}

# Prints the first interpreter that is new enough and can make environments.
find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if command -v "$name" >/dev/null && "$name" -c "$IS_SUPPORTED" 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  fail "expected Python 3.11 or newer with its venv module, got ${PYTHON:-none}; install it (Debian: apt install python3-venv), or set PYTHON=/path/to/python3.11"
}

make_venv() {
  if [[ -x "$VENV/bin/python" ]]; then
    "$VENV/bin/python" -c "$IS_SUPPORTED" ||
      fail "expected Python 3.11 or newer in $VENV, got $("$VENV/bin/python" --version 2>&1); remove that folder"
    return
  fi
  local python
  python="$(find_python)" || exit
  "$python" -m venv "$VENV" || fail "$python could not make $VENV; its message stands above"
}

# Whether this kind of install was done, and nothing has changed since: by the time
# of the change here, since rsync and tar keep the time of an edit elsewhere.
is_installed() {
  [[ -f "$1" ]] && [[ -z "$(find "$ROOT/pyproject.toml" "$ROOT/synthq_jax" \
    "$ROOT/gin_configs" -type f -cnewer "$1" -not -name '*.pyc' -not -name __pycache__ -print -quit)" ]]
}

# install EXTRA SIZE: "[run]" or "[test]".
install() {
  local stamp="$VENV/.synthq_jax$1" start=$SECONDS
  if is_installed "$stamp"; then
    return
  fi
  echo "installing into $VENV (${2:-1 GB} the first time)"
  # Half of the time would go into bytecode of files that nobody imports.
  "$VENV/bin/python" -m pip install --quiet --no-compile \
    --disable-pip-version-check "$ROOT$1" ||
    fail "pip could not install the project (its message stands above); check the network and the disk, then repeat"
  touch "$stamp"
  echo "install: $((SECONDS - start)) s"
}

# Large pages where Linux has them: a tenth less time on a CPU, the same numbers.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
make_venv
if [[ "${1:-}" == test ]]; then
  shift
  install "[test]" "4 GB"
  cd "$ROOT"
  # Programs that an earlier call compiled, but for what nothing has read since.
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$VENV/compiled-tests}"
  if [[ -d "$VENV/compiled-tests" ]]; then
    find "$VENV/compiled-tests" -type f -atime +30 -delete
  fi
  # Three at a time, so that two cores do not wait; seen on 24 GB. `-n 0` behind: one.
  exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile \
    --no-loadscope-reorder "$@"
fi
install "[run]"
# The demo's data is public, so its secret may be fixed: the same versions of
# the packages give the same table on one kind of processor (on another, static
# vectors' last bits differ, and with them the noise of direct DP, weights and
# maps). With a SOURCE of one's own it is drawn.
secret=(--gin.SECRET_SEED=0 "--gin.TEST_SPLIT='dev+test'")  # nothing is chosen on dev
[[ "$*" == *SOURCE=* || "$*" == *source=* ]] && secret=()
# Not bin/synthq, whose first line names the folder in which it was installed: in a
# copy of that folder it would run the original's code.
exec "$VENV/bin/python" -P -m synthq_jax run --gin_file="$ROOT/gin_configs/recipes/demo.gin" \
  ${secret[@]+"${secret[@]}"} --workdir="${WORKDIR:-$ROOT/runs/demo}" "$@"
