"""What Duet, KNRM and PACRR read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import terms as terms_lib


def test_terms_are_cut_padded_and_weighted(vocabulary):
  idf = np.arange(vocabulary.vocab_size, dtype=np.float32)
  terms = rerankers.Terms(
    vocabulary=vocabulary, query_length=3, document_length=2, idf=idf
  )
  found = terms.featurize(["apple stone", "good"], ["river river apple", ""])
  apple, stone = vocabulary.encode("apple stone")
  river, good = vocabulary.encode("river good")
  assert found["query"].tolist() == [[apple, stone, 0], [good, 0, 0]]
  assert found["document"].tolist() == [[river, river], [0, 0]]
  assert found["idf"].tolist() == [[apple, stone, 0.0], [good, 0.0, 0.0]]


def test_without_frequencies_all_terms_weigh_the_same(vocabulary):
  terms = rerankers.Terms(vocabulary=vocabulary, query_length=3)
  assert terms.featurize(["apple"], [""])["idf"].tolist() == [[1.0, 0.0, 0.0]]


def test_frequencies_count_documents_not_words(vocabulary):
  documents = ["apple apple", "apple stone", "river"]
  idf = terms_lib.inverse_document_frequencies(vocabulary, documents)
  apple, stone, cloud = vocabulary.encode("apple stone cloud")
  np.testing.assert_allclose(
    idf[[apple, stone, cloud]], np.log([4 / 3, 4 / 2, 4 / 1]), rtol=1e-6
  )


def test_cosines_are_those_of_numpy_and_zero_at_padding():
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(10, 4)).astype(np.float32)
  batch = {
    "query": jnp.array([[1, 2, 0]]),
    "document": jnp.array([[3, 1, 4, 0, 0]]),
  }
  found, stands = terms_lib.cosines(jnp.asarray(vectors), batch)
  unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  expected = np.zeros((1, 3, 5))
  expected[0, :2, :3] = unit[[1, 2]] @ unit[[3, 1, 4]].T
  np.testing.assert_allclose(found, expected, atol=1e-6)
  np.testing.assert_array_equal(stands, expected != 0)
  assert found[0, 0, 1] == pytest.approx(1.0)


def test_vectors_start_from_a_table_or_at_random(vocabulary):
  table = np.ones((vocabulary.vocab_size + 5, 7))  # tables may have spare rows
  key = jax.random.key(0)
  given = rerankers.Terms(vocabulary=vocabulary, embeddings=table).init(key)
  assert given.shape == table.shape and given.dtype == jnp.float32
  drawn = rerankers.Terms(vocabulary=vocabulary, dim=50).init(key)
  assert drawn.shape == (vocabulary.vocab_size, 50)
  assert abs(float(jnp.std(drawn)) - 1) < 0.05


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"embeddings": np.ones((3, 2))}, "embeddings: expected embeddings of the"),
    ({"idf": np.ones(3)}, "got 3 rows: give the vocabulary that belongs"),
    ({"dim": 0}, "got dim=0"),
    ({"query_length": 0}, "query_length=0"),
    ({"document_length": 0}, "document_length=0"),
  ],
)
def test_what_does_not_fit_is_refused(vocabulary, fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    rerankers.Terms(vocabulary=vocabulary, **fields)
