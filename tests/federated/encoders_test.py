import functools

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.models import t5, t5_config
from synthq_jax.retrieval import encode

_CONFIG = t5_config.get("tiny")
_TOKENS = np.array([[5, 9, 3, 1, 0, 0], [7, 2, 8, 4, 6, 1], [0] * 6], np.int32)


def _params():
  return random_t5.params(_CONFIG)


def _encoders(pooling="mean"):
  return encoders_lib.Encoders(config=_CONFIG, query_pooling=pooling)


def _outputs():
  encode = jax.jit(
    functools.partial(t5.Transformer(_CONFIG).apply, method="encode")
  )
  return np.asarray(encode({"params": _params()}, _TOKENS))


def test_a_question_can_be_the_output_of_its_first_token():
  params = _encoders().init(_params())
  first = _outputs()[:2, 0]
  found = _encoders("first").encode_queries(params, _TOKENS)
  expected = first / np.linalg.norm(first, axis=1, keepdims=True)
  np.testing.assert_allclose(found[:2], expected, atol=1e-6)
  assert not found[2].any()
  # Sentences take the mean all the same.
  np.testing.assert_array_equal(
    _encoders("first").encode_sentences(params, _TOKENS),
    _encoders("mean").encode_sentences(params, _TOKENS),
  )


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_collection_gets_the_vectors_that_training_sees(pooling):
  encoders = _encoders(pooling)
  params = encoders.init(_params())
  tokens = np.tile(_TOKENS, (3, 1))
  for one, all_ in (
    (encoders_lib.QUERY, encoders.encode_queries),
    (encoders_lib.SENTENCE, encoders.encode_sentences),
  ):
    np.testing.assert_allclose(
      all_(params, tokens),
      jax.jit(functools.partial(encoders.encode, part=one))(
        params, tokens=tokens
      ),
      atol=1e-6,
    )


def test_equal_sentences_are_encoded_once(monkeypatch):
  seen = []

  def noted(params, config, tokens, **options):
    seen.append(tokens)
    return retrieval_encode(params, config, tokens, **options)

  retrieval_encode = encode.encode
  monkeypatch.setattr(encode, "encode", noted)
  params = _encoders().init(_params())
  tokens = _TOKENS[[1, 0, 1, 1, 2, 0]]
  vectors = _encoders().encode_sentences(params, tokens)
  np.testing.assert_array_equal(seen[0], _TOKENS[[1, 0, 2]])
  np.testing.assert_array_equal(vectors[[0, 1]], vectors[[2, 5]])
  expected = jax.jit(functools.partial(_encoders().encode, part="sentence"))(
    params, tokens=tokens
  )
  np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_an_unknown_pooling_is_refused():
  with pytest.raises(ValueError, match="pooling='last'"):
    _encoders("last")
