"""Heads: the linear one against scikit-learn's, layers against what is not linear."""

import numpy as np
import pytest

from synthq_jax.training import heads


def test_the_head_is_the_logistic_regression_of_scikit_learn():
  linear_model = pytest.importorskip(
    "sklearn.linear_model", reason="scikit-learn is the oracle"
  )
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 3, 300)
  vectors = rng.normal(size=(3, 4))[labels] + rng.normal(size=(300, 4))
  head = heads.fit(vectors, labels, num_classes=3, weight_decay=1e-6)
  # C = 1 / (n x weight_decay); scikit-learn leaves the biases without decay.
  oracle = linear_model.LogisticRegression(C=1e6 / 300, max_iter=2000, tol=1e-9)
  oracle.fit(vectors, labels)
  logits = np.c_[vectors, np.ones(300)] @ head[0]
  got = np.exp(logits - logits.max(1, keepdims=True))
  got /= got.sum(1, keepdims=True)
  np.testing.assert_allclose(got, oracle.predict_proba(vectors), atol=2e-3)
  agree = heads.predict(head, vectors) == oracle.predict(vectors)
  assert agree.mean() > 0.99


def test_layers_tell_apart_what_no_line_does():
  rng = np.random.default_rng(0)
  vectors = rng.uniform(-1, 1, size=(2000, 2))
  labels = (vectors[:, 0] * vectors[:, 1] > 0).astype(int)
  line = heads.fit(vectors, labels, num_classes=2)
  assert np.mean(heads.predict(line, vectors) == labels) < 0.7
  first, again = (
    heads.fit_layers(
      vectors, labels, num_classes=2, hidden=(64, 32), epochs=100
    )
    for _ in range(2)
  )
  assert [layer.shape for layer in first] == [(3, 64), (65, 32), (33, 2)]
  assert np.mean(heads.predict(first, vectors) == labels) > 0.95
  np.testing.assert_array_equal(first[0], again[0])
