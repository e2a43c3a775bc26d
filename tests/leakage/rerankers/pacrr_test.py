"""PACRR against a slow version of itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import pacrr


def top(values, k):
  return [*sorted(values, reverse=True), *[0.0] * k][:k]


def test_the_best_places_of_a_term_are_its_largest_values():
  rng = np.random.default_rng(0)
  values = rng.normal(size=(2, 3, 6)).astype(np.float32)
  stands = np.zeros(values.shape, bool)
  stands[0, :2, :5] = stands[1, :3, :1] = True
  found = pacrr.best(jnp.asarray(values), jnp.asarray(stands), 2)
  for row in range(2):
    for term in range(3):
      expected = top(values[row, term][stands[row, term]].tolist(), 2)
      np.testing.assert_allclose(found[row, term], expected)


def dense(x, layer):
  return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def slow_score(params, query, document, idf, *, terms, longest, k):
  """One document, one n-gram at a time."""
  query, document = query[query > 0], document[document > 0]
  vectors = np.asarray(params["embedding"])
  vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  size = terms + longest, len(document) + longest
  matrix = np.zeros(size)
  matrix[: len(query), : len(document)] = vectors[query] @ vectors[document].T
  layers = params["network"]
  shares = np.exp(idf[: len(query)]) / np.exp(idf[: len(query)]).sum()
  signals = np.zeros((terms, longest * k + 1))
  for i in range(len(query)):
    row = top(matrix[i, : len(document)].tolist(), k) + [shares[i]]
    for n in range(2, longest + 1):
      places = []
      for j in range(len(document)):
        cells = matrix[i : i + n, j : j + n].ravel()
        filtered = dense(cells, layers[f"Dense_{n - 2}"])
        places.append(np.maximum(filtered, 0).max())
      row += top(places, k)
    signals[i] = row
  x = signals.ravel()
  for layer in (longest - 1, longest):
    x = np.maximum(dense(x, layers[f"Dense_{layer}"]), 0)
  return dense(x, layers[f"Dense_{longest + 1}"])[0]


@pytest.mark.parametrize("longest,k", [(3, 2), (2, 3), (1, 1)])
def test_scores_are_those_of_the_slow_version(vocabulary, longest, k):
  rng = np.random.default_rng(0)
  idf = rng.uniform(0, 3, vocabulary.vocab_size).astype(np.float32)
  model = rerankers.PACRR(
    terms=rerankers.Terms(
      vocabulary=vocabulary, dim=8, query_length=4, document_length=6, idf=idf
    ),
    longest=longest,
    k=k,
    filters=5,
    hidden=7,
  )
  params = model.init(jax.random.key(0))
  params = jax.tree.map(  # biases too
    lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params
  )
  batch = model.featurize(
    ["apple stone river", "good", "cloud table paper music garden"],
    [
      "stone apple apple river bad",
      "good",
      "garden music table cloud fine a b",
    ],
  )
  rows = zip(batch["query"], batch["document"], batch["idf"], strict=True)
  expected = [
    slow_score(params, *row, terms=4, longest=longest, k=k) for row in rows
  ]
  np.testing.assert_allclose(
    jax.jit(model.score)(params, batch), expected, rtol=1e-4, atol=1e-5
  )


def test_the_loss_is_the_softmax_of_the_pair(make_reranker):
  model = make_reranker("PACRR")
  params = model.init(jax.random.key(0))
  batch = model.featurize(["apple"] * 4, ["apple", "river", "fine", "apple a"])
  s = np.asarray(jax.jit(model.score)(params, batch), np.float64)
  expected = np.mean(
    [-np.log(np.exp(s[i]) / np.exp(s[i : i + 2]).sum()) for i in (0, 2)]
  )
  np.testing.assert_allclose(
    jax.jit(model.loss)(params, batch), expected, rtol=1e-5
  )


@pytest.mark.parametrize("train", [True, False])
def test_vectors_are_trained_only_where_asked_for(make_reranker, train):
  model = make_reranker("PACRR", train_embeddings=train)
  params = model.init(jax.random.key(0))
  batch = model.featurize(["apple stone"] * 2, ["apple good", "river bad"])
  gradient = jax.jit(jax.grad(model.loss))(params, batch)
  assert bool(jnp.any(gradient["embedding"] != 0)) == train


@pytest.mark.parametrize("field", ["longest", "filters", "k", "hidden"])
def test_sizes_below_one_are_refused(make_reranker, field):
  with pytest.raises(ValueError, match=f"got {field}=0"):
    make_reranker("PACRR", **{field: 0})
