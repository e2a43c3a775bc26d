"""Duet against a slow version of itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import duet


@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 8, 100])
def test_maxima_are_those_of_the_places_under_each_window(window):
  rng = np.random.default_rng(0)
  values = rng.normal(size=(3, 7, 2)).astype(np.float32)
  lengths = (7, 4, 0)
  stands = np.arange(7)[None] < np.array(lengths)[:, None]
  found = duet.window_max(jnp.asarray(values), jnp.asarray(stands), window)
  expected = np.zeros_like(values)
  for row, length in enumerate(lengths):
    for place in range(length):
      under = values[row, place : min(place + window, length)]
      expected[row, place] = under.max(axis=0)
  np.testing.assert_array_equal(found, expected)


def test_exact_matches_carry_the_weight_of_their_term(vocabulary):
  idf = np.arange(vocabulary.vocab_size, dtype=np.float32)
  model = rerankers.Duet(
    terms=rerankers.Terms(
      vocabulary=vocabulary, query_length=3, document_length=4, idf=idf
    )
  )
  batch = model.featurize(["apple stone"], ["stone good stone"])
  stone = vocabulary.encode("stone")[0]
  assert duet.matches(batch).tolist() == [
    [[0.0] * 4, [stone, 0.0, stone, 0.0], [0.0] * 4]
  ]


def dense(x, layer):
  return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def slow_score(model, params, query, document, idf):
  """One document; the matrices are written out as the paper draws them."""
  local, distributed = params["local"], params["distributed"]
  terms, words = len(query), len(document)
  matrix = np.zeros((terms, words))
  for i in range(terms):
    for j in range(words):
      matrix[i, j] = idf[i] * (query[i] == document[j] != 0)
  x = np.tanh(matrix @ np.asarray(local["kernel"])).ravel()
  x = np.tanh(dense(np.tanh(dense(x, local["Dense_0"])), local["Dense_1"]))
  score = dense(x, local["Dense_2"])[0]

  def filtered(ids, layer):
    ids = ids[ids > 0]
    vectors = np.asarray(params["embedding"])[ids]
    vectors = np.vstack([vectors, np.zeros((model.width, vectors.shape[1]))])
    windows = [vectors[i : i + model.width].ravel() for i in range(len(ids))]
    return np.tanh(dense(np.array(windows), distributed[layer]))

  q = filtered(query, "query_filters").max(axis=0)
  q = np.tanh(dense(q, distributed["query"]))
  found = filtered(document, "document_filters")
  product = np.zeros((words, model.filters))
  for place in range(len(found)):
    d = found[place : place + model.window].max(axis=0)
    product[place] = q * np.tanh(dense(d, distributed["document"]))
  x = np.tanh(dense(product.ravel(), distributed))
  x = np.tanh(dense(x, distributed["hidden"]))
  return score + dense(x, distributed["score"])[0]


def test_scores_are_those_of_the_slow_version(vocabulary):
  rng = np.random.default_rng(0)
  idf = rng.uniform(0, 3, vocabulary.vocab_size).astype(np.float32)
  model = rerankers.Duet(
    terms=rerankers.Terms(
      vocabulary=vocabulary, dim=8, query_length=4, document_length=6, idf=idf
    ),
    window=2,
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
  expected = [slow_score(model, params, *row) for row in rows]
  found = jax.jit(model.score)(params, batch)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert np.ptp(expected) > 0.1


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"filters": 0}, "got filters=0"),
    ({"hidden": 0}, "got hidden=0"),
    ({"width": 0}, "got width=0"),
    ({"window": 0}, "got window=0"),
    ({"dropout_rate": 1.0}, "dropout_rate in"),
  ],
)
def test_sizes_out_of_range_are_refused(make_reranker, fields, message):
  with pytest.raises(ValueError, match=message):
    make_reranker("Duet", **fields)
