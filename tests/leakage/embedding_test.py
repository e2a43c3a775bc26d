"""The detector by cosine, with made vectors and with the shipped encoder."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import near_duplicates
from synthq_jax.retrieval import text_encoders


def letters(texts):
  """Counts of letters, of length 1: anagrams are the same."""
  rows = np.array([[text.count(c) for c in "abc"] for text in texts], float)
  rows = rows.reshape(len(texts), 3)
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


TEXTS = st.lists(st.text(alphabet="abc", max_size=4), max_size=8)


@hypothesis.given(TEXTS, TEXTS)
def test_an_index_finds_every_pair_that_points_the_same_way(queries, targets):
  detector = near_duplicates.Embedding(encode=letters, threshold=0.99)
  found = detector.index(targets).match(queries)
  pairs = list(zip(found[0].tolist(), found[1].tolist(), strict=True))
  expected = [
    (i, j)
    for i, query in enumerate(queries)
    for j, target in enumerate(targets)
    if detector.scores([query], [target])[0] >= 0.99
  ]
  assert pairs == expected


def test_at_a_threshold_of_1_every_copy_is_found():
  """Of half of them the cosine is 1 less what single precision loses."""
  rng = np.random.default_rng(0)
  table = rng.normal(size=(200, 64)).astype(np.float32)
  table /= np.linalg.norm(table, axis=1, keepdims=True)
  detector = near_duplicates.Embedding(
    encode=lambda texts: table[[int(x) for x in texts]], threshold=1.0
  )
  texts = [str(i) for i in range(len(table))]
  assert (detector.scores(texts, texts) == 1).all()
  rows, columns, _ = detector.index(texts).match(texts)
  assert rows.tolist() == columns.tolist() == list(range(len(table)))


def test_only_the_nearest_targets_are_looked_at():
  targets = ["aab", "ab", "aaab", "c"]
  wide = near_duplicates.Embedding(encode=letters, threshold=0.5)
  assert wide.index(targets).match(["aab"])[1].tolist() == [0, 1, 2]
  narrow = near_duplicates.Embedding(encode=letters, threshold=0.5, top_k=1)
  assert narrow.index(targets).match(["aab"])[1].tolist() == [0]


def test_vectors_of_another_length_are_refused():
  detector = near_duplicates.Embedding(encode=lambda texts: 2 * letters(texts))
  with pytest.raises(ValueError, match="length 1.*lengths up to 2"):
    detector.index(["ab"])


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"top_k": 0}])
def test_wrong_settings_are_refused(wrong):
  with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
    near_duplicates.Embedding(encode=letters, **wrong)


@pytest.mark.slow
def test_the_shipped_encoder_knows_equal_texts_in_whatever_batches():
  encode = text_encoders.load().encode
  texts = ["sort an array", "the inverse of a matrix", "", "sort an array"]
  vectors = encode(texts)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
  alone = np.concatenate([encode([text]) for text in texts])
  np.testing.assert_allclose(alone, vectors, atol=1e-5)
  detector = near_duplicates.Embedding(encode=encode, threshold=0.999)
  found = detector.index(texts[:2]).match(texts)
  pairs = list(zip(found[0].tolist(), found[1].tolist(), strict=True))
  assert pairs == [(0, 0), (1, 1), (3, 0)]
