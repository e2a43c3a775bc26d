"""What Duet, KNRM and PACRR read, and each against a slow version of itself."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import duet
from synthq_jax.leakage.rerankers import terms as terms_lib


def dense(x, layer):
  return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def weighted(kind, vocabulary):
  """A generator, and a reranker with random vectors and frequencies."""
  rng, size = np.random.default_rng(0), vocabulary.vocab_size
  return rng, kind(
    vocabulary=vocabulary,
    embeddings=rng.normal(size=(size, 8)),
    query_length=4,
    document_length=6,
    idf=rng.uniform(0, 3, size).astype(np.float32),
  )


def started(model, rng):
  """Parameters none of which is 0, and a batch with cut and short texts."""
  params = jax.tree.map(
    lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
    model.init(jax.random.key(0)),
  )
  batch = model.featurize(
    ["apple stone river", "good", "cloud table paper music garden"],
    [
      "stone apple apple river bad",
      "good",
      "garden music table cloud fine a b",
    ],
  )
  return params, batch


def test_terms_are_cut_padded_and_weighted(vocabulary):
  idf = np.arange(vocabulary.vocab_size, dtype=np.float32)
  terms = rerankers.KNRM(
    vocabulary=vocabulary,
    embeddings=np.ones((len(idf), 2)),
    query_length=3,
    document_length=2,
    idf=idf,
  )
  found = terms.featurize(["apple stone", "good"], ["river river apple", ""])
  apple, stone = vocabulary.encode("apple stone")
  river, good = vocabulary.encode("river good")
  assert found["query"].tolist() == [[apple, stone, 0], [good, 0, 0]]
  assert found["document"].tolist() == [[river, river], [0, 0]]
  assert found["idf"].tolist() == [[apple, stone, 0.0], [good, 0.0, 0.0]]


def test_frequencies_count_documents_not_words(vocabulary):
  documents = ["apple apple", "apple stone", "river"]
  idf = terms_lib.inverse_document_frequencies(vocabulary, documents)
  apple, stone, cloud = vocabulary.encode("apple stone cloud")
  np.testing.assert_allclose(
    idf[[apple, stone, cloud]], np.log([4 / 3, 4 / 2, 4 / 1]), rtol=1e-6
  )


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"embeddings": np.ones((3, 2))}, "embeddings: expected embeddings of the"),
    ({"idf": np.ones(3)}, "got 3 rows: give the vocabulary that belongs"),
  ],
)
def test_tables_that_do_not_fit_are_refused(make_reranker, fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    dataclasses.replace(make_reranker("KNRM"), **fields)


def pooled(similarity, terms, words):
  """phi(M) of one query and document, as the paper writes it."""
  found = []
  for mu, sigma in zip(terms_lib.MEANS, terms_lib.DEVIATIONS, strict=True):
    total = 0.0
    for i in range(terms):
      kernel = sum(
        math.exp(-((similarity[i, j] - mu) ** 2) / (2 * sigma**2))
        for j in range(words)
      )
      total += math.log(max(kernel, 1e-10))
    found.append(total)
  return found


def test_pooling_is_the_papers():
  rng = np.random.default_rng(0)
  similarity = rng.uniform(-1, 1, size=(3, 4, 9))
  similarity[0, 0, 2] = 1.0  # an exact match
  sizes = [(4, 9), (2, 5), (3, 0)]
  stands = np.zeros(similarity.shape, bool)
  for row, (terms, words) in enumerate(sizes):
    stands[row, :terms, :words] = True
  found = terms_lib.pool(
    jnp.asarray(similarity, jnp.float32),
    jnp.asarray(stands),
    jnp.asarray([[place < terms for place in range(4)] for terms, _ in sizes]),
  )
  for row in (0, 1):
    expected = pooled(similarity[row], *sizes[row])
    np.testing.assert_allclose(found[row], expected, rtol=2e-3, atol=1e-3)
  # A document without terms has nothing near any of the query's three: it was
  # pooled to 0, above all others.
  np.testing.assert_allclose(
    found[2], np.full(11, 3 * np.log(1e-10)), rtol=1e-6
  )


def test_score_and_loss_follow_from_the_pooled_kernels(make_reranker):
  model = make_reranker("KNRM")
  params = model.init(jax.random.key(0))
  params = params | {"weights": jnp.arange(11.0) / 10, "bias": jnp.float32(0.2)}
  batch = model.featurize(
    ["apple stone", "apple stone", "river", "river"],
    ["stone good apple", "bad cloud", "river fine", "table wrong paper"],
  )
  vectors = np.asarray(params["embedding"], np.float64)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  scores = []
  for query, document in zip(batch["query"], batch["document"], strict=True):
    query, document = query[query > 0], document[document > 0]
    matrix = vectors[query] @ vectors[document].T
    phi = pooled(matrix, *matrix.shape)
    scores.append(0.01 * np.dot(phi, np.arange(11) / 10) + 0.2)
  np.testing.assert_allclose(model.score(params, batch), scores, rtol=1e-3)
  f = np.tanh(scores)
  hinge = np.mean([max(0, 1 - f[0] + f[1]), max(0, 1 - f[2] + f[3])])
  np.testing.assert_allclose(model.loss(params, batch), hinge, rtol=1e-3)


def top(values, k):
  return [*sorted(values, reverse=True), *[0.0] * k][:k]


def slow_pacrr(params, query, document, idf, *, terms, longest=3, k=2):
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


def test_pacrr_scores_are_those_of_the_slow_version(vocabulary):
  rng, model = weighted(rerankers.PACRR, vocabulary)
  params, batch = started(model, rng)
  rows = zip(batch["query"], batch["document"], batch["idf"], strict=True)
  expected = [slow_pacrr(params, *row, terms=4) for row in rows]
  np.testing.assert_allclose(
    jax.jit(model.score)(params, batch), expected, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  "name,own,train", [("KNRM", "weights", True), ("PACRR", "network", False)]
)
def test_vectors_are_trained_as_in_the_papers(make_reranker, name, own, train):
  model = make_reranker(name)
  params = model.init(jax.random.key(0))
  batch = model.featurize(["apple stone"] * 2, ["apple good", "river bad"])
  gradient = jax.jit(jax.grad(model.loss))(params, batch)
  assert bool(jnp.any(gradient["embedding"] != 0)) == train
  assert any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient[own]))


@pytest.mark.parametrize("window", [1, 3, 8, 100])
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


def slow_duet(params, query, document, idf):
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
    vectors = np.vstack([vectors, np.zeros((3, vectors.shape[1]))])
    windows = [vectors[i : i + 3].ravel() for i in range(len(ids))]
    return np.tanh(dense(np.array(windows), distributed[layer]))

  q = filtered(query, "query_filters").max(axis=0)
  q = np.tanh(dense(q, distributed["query"]))
  found = filtered(document, "document_filters")
  product = np.zeros((words, 10))
  for place in range(len(found)):
    d = found[place : place + 100].max(axis=0)
    product[place] = q * np.tanh(dense(d, distributed["document"]))
  x = np.tanh(dense(product.ravel(), distributed))
  x = np.tanh(dense(x, distributed["hidden"]))
  return score + dense(x, distributed["score"])[0]


def test_duet_scores_are_those_of_the_slow_version(vocabulary):
  rng, model = weighted(rerankers.Duet, vocabulary)
  params, batch = started(model, rng)
  rows = zip(batch["query"], batch["document"], batch["idf"], strict=True)
  expected = [slow_duet(params, *row) for row in rows]
  found = jax.jit(model.score)(params, batch)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert np.ptp(expected) > 0.1
