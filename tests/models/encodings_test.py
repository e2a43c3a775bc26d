"""What an encoder makes of a collection: once, in any order, of each alone."""

import dataclasses

import numpy as np
import pytest
import random_t5

from synthq_jax.models import device_rows, encodings, t5, t5_checkpoints

CONFIG = random_t5.config(vocab_size=23, num_decoder_layers=1)
PARAMS = random_t5.params(CONFIG)
FLAT = t5_checkpoints.flatten(PARAMS)


@pytest.fixture(name="tokens")
def _tokens():
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, 23, (23, 6)).astype(np.int32)
  tokens[::3, 4:] = 0
  return tokens


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
  monkeypatch.setattr(encodings, "_BLOCK", 8)
  monkeypatch.setattr(device_rows, "CPU_ROWS", 4)
  monkeypatch.setattr(encodings._kept, "_results", {})


def whole(tokens, config=CONFIG):
  model = t5.Transformer(config)
  return np.asarray(model.apply({"params": PARAMS}, tokens, method="encode"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_encoder(tokens, dtype):
  config = dataclasses.replace(CONFIG, dtype=dtype)
  made = encodings.Encodings(FLAT, config, tokens)
  places = np.array([22, 0, 7, 8, 7, 16])
  got, expected = made.rows(places), whole(tokens, config)[places]
  assert got.dtype == expected.dtype
  atol = 1e-5 if dtype == "float32" else 0.1
  np.testing.assert_allclose(
    got.astype(np.float32), expected.astype(np.float32), atol=atol
  )
  assert made.rows(np.arange(0)).shape == (0, 6, CONFIG.emb_dim)


def test_each_document_is_encoded_once_and_only_when_asked_for(
  tokens, monkeypatch
):
  calls = []

  def count(params, config, tokens):
    assert all(path.startswith(encodings.PARTS) for path in params)
    calls.append(len(tokens))
    return encode(params, config, tokens)

  encode = encodings.encode
  monkeypatch.setattr(encodings, "encode", count)
  made = encodings.kept(FLAT, CONFIG, tokens)
  assert not calls
  first = made.rows(np.array([9, 10]))
  assert calls == [8]
  again = encodings.kept(dict(FLAT), CONFIG, tokens.copy())
  np.testing.assert_array_equal(again.rows(np.array([9, 10])), first)
  again.rows(np.arange(23))
  assert calls == [8, 8, 8]  # the last one is filled up: one program for all


def test_another_decoder_shares_and_another_encoder_does_not(tokens):
  made = encodings.kept(FLAT, CONFIG, tokens)
  other = {k: v + 1 if k.startswith("decoder") else v for k, v in FLAT.items()}
  assert encodings.kept(other, CONFIG, tokens) is made
  with_dropout = dataclasses.replace(CONFIG, dropout_rate=0.1)
  assert encodings.kept(FLAT, with_dropout, tokens) is made
  path = "encoder/layers_0/mlp/wo/kernel"
  for params, config, read in (
    ({**FLAT, path: FLAT[path] * np.float32(1 + 2**-23)}, CONFIG, tokens),
    (FLAT, dataclasses.replace(CONFIG, dtype="bfloat16"), tokens),
    (FLAT, CONFIG, tokens[:, :5]),
    (FLAT, CONFIG, tokens[::-1]),
  ):
    assert encodings.kept(params, config, read) is not made
    assert len(encodings._kept) == 1
    made = encodings.kept(params, config, read)


def test_an_output_does_not_depend_on_the_other_documents(tokens):
  outputs = encodings.encode(FLAT, CONFIG, tokens)
  moved = tokens.copy()
  moved[1:] = moved[:0:-1]
  np.testing.assert_array_equal(
    encodings.encode(FLAT, CONFIG, moved)[0], outputs[0]
  )
  for count in (1, 5, 22):
    np.testing.assert_array_equal(
      encodings.encode(FLAT, CONFIG, tokens[:count]), outputs[:count]
    )
