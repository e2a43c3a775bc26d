"""The linear head against scikit-learn's logistic regression."""

import numpy as np
import pytest

from synthq_jax.training import linear_head


def test_the_head_is_the_logistic_regression_of_scikit_learn():
  linear_model = pytest.importorskip(
    "sklearn.linear_model", reason="scikit-learn is the oracle"
  )
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 3, 300)
  vectors = rng.normal(size=(3, 4))[labels] + rng.normal(size=(300, 4))
  head = linear_head.fit(vectors, labels, num_classes=3, weight_decay=1e-6)
  # C = 1 / (n x weight_decay); scikit-learn leaves the biases without decay.
  oracle = linear_model.LogisticRegression(C=1e6 / 300, max_iter=2000, tol=1e-9)
  oracle.fit(vectors, labels)
  logits = np.c_[vectors, np.ones(300)] @ head
  got = np.exp(logits - logits.max(1, keepdims=True))
  got /= got.sum(1, keepdims=True)
  np.testing.assert_allclose(got, oracle.predict_proba(vectors), atol=2e-3)
  agree = linear_head.predict(head, vectors) == oracle.predict(vectors)
  assert agree.mean() > 0.99


def test_classes_that_are_apart_are_told_apart():
  vectors = np.eye(3).repeat(4, axis=0)
  labels = np.arange(3).repeat(4)
  head = linear_head.fit(vectors, labels, num_classes=3)
  np.testing.assert_array_equal(linear_head.predict(head, vectors), labels)
