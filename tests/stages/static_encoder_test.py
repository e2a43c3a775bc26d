"""Spans of documents that static vectors begin with."""

import numpy as np
import pytest

from synthq_jax.data import passages
from synthq_jax.stages import static_encoder

LENGTH = 24


@pytest.fixture(scope="module")
def collection():
  """A token says its document and its place: 100 * document + place."""
  sizes = [23, 3, 8, 15]
  tokens = np.zeros((4, LENGTH), np.int32)
  for row, size in enumerate(sizes):
    tokens[row, :size] = 100 * (row + 1) + np.arange(size)
    tokens[row, size] = 1
  return passages.Passages(
    np.array(list("abcd")), tokens, np.array([0, 0, 1, 2])
  )


def test_a_span_was_taken_out_of_its_document(collection):
  found = static_encoder.draw_spans(collection, 4000, 0)
  whole = collection.tokens
  stayed, seen = 0, set()
  for query, document, owner in zip(
    found["queries"], found["documents"], found["rows"], strict=True
  ):
    size = int((query > 0).sum())
    span = query[:size]
    row = span[0] // 100 - 1
    assert 4 <= size <= 10 and not query[size:].any()
    np.testing.assert_array_equal(span, span[0] + np.arange(size))
    assert owner == collection.owners[row]
    left = np.where(np.isin(whole[row], span), 0, whole[row])
    if not np.isin(span, document).any():
      np.testing.assert_array_equal(document, left)
    else:
      np.testing.assert_array_equal(document, whole[row])
      stayed += 1
    assert size <= (whole[row] > 1).sum() // 2
    seen.add((int(span[0]), size))
  total = len(found["rows"])
  assert abs(stayed / total - 0.1) < 0.02
  assert abs(total / 4000 - 0.75) < 0.03  # one of four is too short
  lasts = {start % 100 + size for start, size in seen if start < 200}
  assert {start % 100 for start, _ in seen} >= {0, 13} and max(lasts) == 23


def test_spans_follow_from_the_seed(collection):
  first, again, other = (
    static_encoder.draw_spans(collection, 50, seed) for seed in (0, 0, 1)
  )
  for name, values in first.items():
    np.testing.assert_array_equal(values, again[name])
  assert len(first["rows"]) != len(other["rows"]) or any(
    (first[name] != other[name]).any() for name in first
  )
  assert not len(static_encoder.draw_spans(collection, 0, 0)["rows"])


def test_every_token_has_a_direction():
  idf = np.log((9 + 1) / (np.array([9, 8, 1, 0]) + 1))
  weights = static_encoder._weights(idf, 9)
  np.testing.assert_allclose(weights, [0.1, np.log(10 / 9), np.log(5), 0.1])
