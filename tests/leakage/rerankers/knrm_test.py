"""KNRM against its formulas, one pair of terms at a time."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import knrm


def pooled(similarity, terms, words, means, deviations):
  """phi(M) of one query and document, as the paper writes it."""
  found = []
  for mu, sigma in zip(means, deviations, strict=True):
    total = 0.0
    for i in range(terms):
      kernel = sum(
        math.exp(-((similarity[i, j] - mu) ** 2) / (2 * sigma**2))
        for j in range(words)
      )
      total += math.log(max(kernel, 1e-10))
    found.append(total)
  return found


def test_pooling_is_the_papers(make_reranker):
  model = make_reranker("KNRM")
  rng = np.random.default_rng(0)
  similarity = rng.uniform(-1, 1, size=(3, 4, 9))
  similarity[0, 0, 2] = 1.0  # an exact match
  sizes = [(4, 9), (2, 5), (3, 0)]
  stands = np.zeros(similarity.shape, bool)
  for row, (terms, words) in enumerate(sizes):
    stands[row, :terms, :words] = True
  found = knrm.pool(
    jnp.asarray(similarity, jnp.float32),
    jnp.asarray(stands),
    model.means,
    model.deviations,
  )
  for row in (0, 1):
    expected = pooled(
      similarity[row], *sizes[row], model.means, model.deviations
    )
    np.testing.assert_allclose(found[row], expected, rtol=2e-3, atol=1e-3)
  # A term counts where the document has one to compare it with.
  np.testing.assert_array_equal(found[2], np.zeros(11))


def test_there_are_eleven_kernels_and_one_of_exact_matches(make_reranker):
  model = make_reranker("KNRM")
  assert len(model.means) == len(model.deviations) == 11
  assert (model.means[-1], model.deviations[-1]) == (1.0, 0.001)


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
    phi = pooled(matrix, *matrix.shape, model.means, model.deviations)
    scores.append(0.01 * np.dot(phi, np.arange(11) / 10) + 0.2)
  np.testing.assert_allclose(model.score(params, batch), scores, rtol=1e-3)
  f = np.tanh(scores)
  hinge = np.mean([max(0, 1 - f[0] + f[1]), max(0, 1 - f[2] + f[3])])
  np.testing.assert_allclose(model.loss(params, batch), hinge, rtol=1e-3)


@pytest.mark.parametrize("train", [True, False])
def test_vectors_are_trained_only_where_asked_for(make_reranker, train):
  model = make_reranker("KNRM", train_embeddings=train)
  params = model.init(jax.random.key(0))
  batch = model.featurize(["apple"] * 2, ["apple good", "river"])
  gradient = jax.grad(model.loss)(params, batch)
  assert bool(jnp.any(gradient["embedding"] != 0)) == train
  assert jnp.any(gradient["weights"] != 0)


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"means": (0.1,)}, "1 means and 11 deviations"),
    ({"means": (), "deviations": ()}, "0 means and 0 deviations"),
    ({"means": (0.1,), "deviations": (0.0,)}, "deviations=(0.0,)"),
  ],
)
def test_kernels_that_do_not_fit_are_refused(vocabulary, fields, message):
  terms = rerankers.Terms(vocabulary=vocabulary)
  with pytest.raises(ValueError, match=re.escape(message)):
    rerankers.KNRM(terms=terms, **fields)
