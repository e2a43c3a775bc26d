#!/bin/sh
# ranx==0.3.21
#
# ranx.fuse with its default min-max norm gives the only document of a list 0:
# a system that finds one document with certainty adds as much as one that did
# not find it.
#
# Why it surprises: the best document of every longer list gets 1. The lone
# document is the best and the worst, and the formula's guard against division
# by zero makes it the worst.
#
# Whom it hurts: fusing BM25 with dense results: rare words and ids are
# queries that match one document alone.
#
# Source: ranx/normalization/min_max_norm.py, _min_max_norm.
#
# Seen: min-max: d9 0.0, max: d9 1.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet ranx==0.3.21
cd "$work"
cat > program.py <<'END'
from ranx import Run, fuse

dense = Run({"q": {"d1": 5.0, "d2": 3.0, "d3": 1.0}})
lexical = Run({"q": {"d9": 7.0}})
lone = {
  norm: fuse([dense, lexical], norm=norm, method="sum").to_dict()["q"]["d9"]
  for norm in ("min-max", "max")
}
print(*(f"{norm}: d9 {score}" for norm, score in lone.items()))
if lone != {"min-max": 0.0, "max": 1.0}:
  raise SystemExit("changed: a lone document is normalised otherwise")
END
"$work/env/bin/python" program.py
