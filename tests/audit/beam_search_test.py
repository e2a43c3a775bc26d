"""The beam search of the inversion audit, against all texts there are."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from synthq_jax.audit import _beam_search
from synthq_jax.models import t5, t5_config

MODEL = dataclasses.replace(
  t5_config.get("tiny"),
  vocab_size=5,
  num_encoder_layers=1,
  num_decoder_layers=1,
)
LENGTH, ROWS = 3, 6


@jax.jit
def logits(params, memory, tokens):
  """Those of each next token given the tokens before it, without a cache."""

  def apply(transformer):
    mask = np.ones((len(memory), 1, 1, memory.shape[1]), bool)
    x = transformer.token_embedder(t5.shift_right(tokens))
    x = transformer.decoder(x, memory, mask)
    return transformer.decoder.logits(x, transformer.token_embedder.embedding)

  return t5.Transformer(MODEL).apply({"params": params}, method=apply)


@pytest.fixture(name="params", scope="module")
def _params():
  params = t5.init_params(MODEL, jax.random.key(2))
  # Sharper than at the start, so that the best text is no narrow matter.
  return jax.tree.map(lambda leaf: 1.5 * leaf, params)


@pytest.fixture(name="memory", scope="module")
def _memory():
  return 4.0 * jax.random.normal(jax.random.key(1), (ROWS, 2, MODEL.emb_dim))


def texts():
  """All texts of at most LENGTH tokens that end once, padded."""
  found = []
  for tokens in itertools.product(range(5), repeat=LENGTH):
    end = tokens.index(1) + 1 if 1 in tokens else LENGTH
    if 0 not in tokens[:end] and not any(tokens[end:]):
      found.append(tokens)
  return np.array(found, np.int32)


def scores(params, memory):
  """Log-probability of every text for every row; padding cannot be written."""
  every = texts()
  found = []
  for row in memory:
    rows = np.broadcast_to(row, (len(every), *row.shape))
    out = np.array(logits(params, rows, every))
    out[..., 0] = -np.inf
    logs = np.asarray(jax.nn.log_softmax(out))
    chosen = np.take_along_axis(logs, every[..., None], axis=-1)[..., 0]
    found.append(np.sum(np.where(every > 0, chosen, 0.0), axis=1))
  return np.array(found)


def search(params, memory, beams):
  return np.asarray(
    _beam_search.search(
      params, memory, config=MODEL, max_length=LENGTH, beams=beams
    )
  )


def test_enough_beams_find_the_likeliest_text_of_all(params, memory):
  every, expected = texts(), scores(params, memory)
  found = search(params, memory, 25)
  np.testing.assert_array_equal(found, every[np.argmax(expected, axis=1)])
  assert len({tuple(row) for row in found.tolist()}) > 3


def test_one_beam_takes_the_likeliest_token_each_time(params, memory):
  written = np.zeros((ROWS, LENGTH), np.int32)
  for position in range(LENGTH):
    out = logits(params, memory, written)
    best = 1 + np.argmax(np.asarray(out)[:, position, 1:], axis=-1)
    ended = np.any(written == 1, axis=1)
    written[:, position] = np.where(ended, 0, best)
  np.testing.assert_array_equal(search(params, memory, 1), written)


def test_a_row_does_not_depend_on_its_neighbours(params, memory):
  np.testing.assert_array_equal(
    search(params, memory[2:4], 3), search(params, memory, 3)[2:4]
  )
