#!/bin/sh
# pytrec_eval-terrier==0.5.11
#
# A run in Python floats with 300.00001 for the relevant document b and 300.0
# for z has reciprocal rank 0.5: pytrec_eval keeps scores in 32 bits, sees a
# tie, and puts the larger id first.
#
# Why it surprises: the scores are Python floats and differ far above double
# precision; sorting them in Python gives rank 1.
#
# Whom it hurts: dot products and log-likelihoods of some hundreds that are
# close to one another. Every measure of ir_measures that this library
# computes has it too.
#
# Source: trec_eval, trec_format.h, TEXT_RESULTS.sim is a float.
#
# Seen: 300.00001: 0.5, 300.0001: 1.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet pytrec_eval-terrier==0.5.11
cd "$work"
cat > program.py <<'END'
import pytrec_eval

evaluator = pytrec_eval.RelevanceEvaluator({"q": {"b": 1}}, {"recip_rank"})


def rank(score):
  run = {"q": {"b": score, "z": 300.0}}
  return evaluator.evaluate(run)["q"]["recip_rank"]


near, far = rank(300.00001), rank(300.0001)
print("300.00001:", near, "300.0001:", far)
if (near, far) != (0.5, 1.0):
  raise SystemExit("changed: scores are compared in another precision")
END
"$work/env/bin/python" program.py
