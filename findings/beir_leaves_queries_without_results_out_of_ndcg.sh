#!/bin/sh
# beir==2.2.0, pytrec_eval-terrier==0.5.11, numpy==2.4.6, tqdm==4.67.1
#
# EvaluateRetrieval.evaluate leaves judged queries that the results do not name
# out of nDCG, MAP, Recall and P. MRR, capped recall and accuracy of the same
# class count them as 0, and so does nDCG if such a query has an empty dict.
#
# Why it surprises: the mean is over the results, not over the judgements that
# are handed in beside them. A system looks better for each query that it does
# not answer, and two measures of one run have different denominators.
#
# Whom it hurts: sparse and filtered retrieval, where some queries find
# nothing and a run's writer skips them; tables that compare such a system
# with a dense one.
#
# Source: beir/retrieval/evaluation.py, evaluate: sums are divided by
# len(scores), and pytrec_eval scores the queries of the run alone.
#
# Seen: one of two queries answered: NDCG@10 1.0 MRR@10 0.5; with an empty
#   dict: NDCG@10 0.5 MRR@10 0.5
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
export PIP_NO_DEPS=1  # without the encoders (2 GB)
"$work/env/bin/pip" install --quiet beir==2.2.0 pytrec_eval-terrier==0.5.11 numpy==2.4.6 tqdm==4.67.1
cd "$work"
cat > program.py <<'END'
from beir.retrieval.evaluation import EvaluateRetrieval

judged = {"q1": {"d1": 1}, "q2": {"d2": 1}}


def measure(results):
  ndcg = EvaluateRetrieval.evaluate(judged, results, [10])[0]
  return ndcg | EvaluateRetrieval.evaluate_custom(judged, results, [10], "mrr")


def write(scores):
  return " ".join(f"{name} {value}" for name, value in scores.items())


lacking = measure({"q1": {"d1": 2.0}})
empty = measure({"q1": {"d1": 2.0}, "q2": {}})
print(
  f"one of two queries answered: {write(lacking)};"
  f" with an empty dict: {write(empty)}"
)
if lacking != {"NDCG@10": 1.0, "MRR@10": 0.5} or empty["NDCG@10"] != 0.5:
  raise SystemExit("changed: queries without results count otherwise")
END
"$work/env/bin/python" program.py
