"""Each reranker learns what can be learnt, and nothing where nothing can."""

import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.retrieval import measures

SEEDS = (0, 1, 2)
RECIPES = {
  "monoT5": rerankers.Recipe(steps=150, learning_rate=1e-2),
  "monoBERT": rerankers.Recipe(steps=150, learning_rate=3e-3),
  "Duet": rerankers.Recipe(steps=150, learning_rate=1e-2),
  "KNRM": rerankers.Recipe(steps=150, learning_rate=1e-2),
  "PACRR": rerankers.Recipe(steps=150, learning_rate=1e-2),
}


def reached(reranker, toy, seed, folder, *, shuffled):
  """nDCG@10 on held-out queries."""
  params = rerankers.train(
    reranker,
    toy.triples(200, shuffled=shuffled),
    recipe=RECIPES[reranker.name],
    seed=seed,
    directory=folder,
  )
  candidates, queries, documents, qrels = toy.collection()
  run = rerankers.rerank(reranker, params, candidates, queries, documents)
  return measures.evaluate(qrels, run, ("nDCG@10",)).mean["nDCG@10"]


@pytest.mark.parametrize(
  "reranker",
  [
    pytest.param(name, marks=[] if name == "KNRM" else pytest.mark.slow)
    for name in RECIPES
  ],
  indirect=True,
)
def test_a_separable_task_is_learnt(reranker, make_toy, tmp_path):
  assert reached(reranker, make_toy(0), 0, tmp_path, shuffled=False) > 0.95


def test_shuffled_labels_teach_nothing(make_reranker, make_toy, tmp_path):
  reranker = make_reranker("KNRM")
  # Where labels say nothing, a model may like or dislike matches by chance, so
  # one seed says little.
  chance = [
    reached(reranker, make_toy(seed), seed, tmp_path / f"{seed}", shuffled=True)
    for seed in SEEDS
  ]
  assert np.mean(chance) < 0.8
