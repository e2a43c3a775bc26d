#!/bin/sh
# beir==2.2.0, pytrec_eval-terrier==0.5.11, numpy==2.4.6, tqdm==4.67.1
#
# EvaluateRetrieval.evaluate removes, by default, the document whose id is the
# query's, also where that document is judged relevant. It removes it from the
# caller's own dict: with ignore_identical_ids=False afterwards, the same run
# still lacks it.
#
# Why it surprises: the option is for ArguAna and Quora, where queries are
# documents themselves. Nothing connects the numbers of other queries and
# documents. And who meets the first score repeats the call with the option
# off, which then seems to change nothing.
#
# Whom it hurts: sets of pairs whose queries and documents are both numbered
# from 0, where document i answers query i: a perfect run has nDCG 0. The
# message about it is logged at level INFO, which nobody sees by default.
#
# Source: beir/retrieval/evaluation.py, evaluate: results[qid].pop(pid).
#
# Seen: a perfect run: NDCG@10 0.0; again without the option: 0.0; a fresh copy
#   of the run without it: 1.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
export PIP_NO_DEPS=1  # without the encoders (2 GB)
"$work/env/bin/pip" install --quiet beir==2.2.0 pytrec_eval-terrier==0.5.11 numpy==2.4.6 tqdm==4.67.1
cd "$work"
cat > program.py <<'END'
from beir.retrieval.evaluation import EvaluateRetrieval

judged = {str(i): {str(i): 1} for i in range(5)}


def make_run():
  return {str(i): {str(i): 2.0, str((i + 1) % 5): 1.0} for i in range(5)}


def measure(run, **options):
  ndcg = EvaluateRetrieval.evaluate(judged, run, [10], **options)[0]
  return ndcg["NDCG@10"]


run = make_run()
first = measure(run)
again = measure(run, ignore_identical_ids=False)
fresh = measure(make_run(), ignore_identical_ids=False)
print(
  f"a perfect run: NDCG@10 {first}; again without the option: {again};"
  f" a fresh copy of the run without it: {fresh}"
)
if (first, again, fresh) != (0.0, 0.0, 1.0):
  raise SystemExit("changed: relevant documents, or the caller's run, are kept")
END
"$work/env/bin/python" program.py
