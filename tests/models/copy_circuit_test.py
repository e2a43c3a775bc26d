"""The circuit copies: measured on fresh parameters, before any training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.models import copy_circuit, t5, t5_config, t5_layers

DEMO = dataclasses.replace(
  t5_config.get("demo"), vocab_size=4096, num_encoder_layers=2
)
LENGTH = 24


@pytest.fixture(scope="module")
def plain():
  return jax.jit(lambda key: t5.init_params(DEMO, key))(jax.random.key(0))


@pytest.fixture(scope="module")
def with_circuit(plain):
  return copy_circuit.add(plain, DEMO, jax.random.key(1))


@pytest.fixture(scope="module")
def tokens():
  """Rows of distinct tokens: what follows a token is never in doubt."""
  rng = np.random.default_rng(0)
  rows = [rng.permutation(np.arange(2, 4096))[:LENGTH] for _ in range(16)]
  return np.array(rows, np.int32)


@jax.jit
def logits_of_the_next(params, tokens):
  """Logits [row, LENGTH - 1, vocab] where the decoder writes its input."""
  logits = t5.Transformer(DEMO).apply({"params": params}, tokens, tokens)
  return logits[:, :-1]


def mean_log_prob(logits, chosen):
  """Mean log-probability of [row, LENGTH - 1] chosen tokens, in nats."""
  log_norm = np.logaddexp.reduce(logits, axis=-1)
  picked = np.take_along_axis(logits, chosen[..., None], -1)[..., 0]
  return (picked - log_norm).mean()


@jax.jit
def first_cross_attention(params, tokens):
  """Scores and output of the layer, where the decoder writes its input.

  Returns:
    Weights [row, head, written, read] and output [row, written, dim].
  """
  model = t5.Transformer(DEMO)
  encoded = model.apply({"params": params}, tokens, method=model.encode)
  written = params["token_embedder"]["embedding"][tokens]
  written /= jnp.sqrt((written**2).mean(-1, keepdims=True))
  kernels = params["decoder"]["layers_0"]["encoder_decoder_attention"]
  layer = t5_layers.Attention(DEMO).bind({"params": kernels})
  attended = layer.keys_values(encoded)
  query = (written @ kernels["query"]["kernel"]).reshape(attended.keys.shape)
  scores = jnp.einsum("bqhd,bkhd->bhqk", query, attended.keys)
  everywhere = jnp.ones((len(tokens), 1, 1, LENGTH), bool)
  output = layer(written, attended, everywhere)
  return jax.nn.softmax(scores, axis=-1), output


def test_the_first_cross_attention_looks_behind_the_last_written_token(
  plain, with_circuit, tokens
):
  def behind(params, heads):
    """Mean weight on the position after the one that is written."""
    weights, _ = first_cross_attention(params, tokens)
    return np.diagonal(weights, 1, axis1=2, axis2=3)[:, heads].mean()

  half = DEMO.num_heads // 2
  assert behind(with_circuit, slice(half)) > 0.5
  assert behind(with_circuit, slice(half, None)) < 2 / LENGTH
  assert behind(plain, slice(half)) < 2 / LENGTH


def test_it_hands_over_the_token_that_stands_there(plain, with_circuit, tokens):
  def hits(params):
    """How often its output is nearest to the next token, of all 4096."""
    _, output = first_cross_attention(params, tokens)
    nearest = (output @ params["token_embedder"]["embedding"].T).argmax(-1)
    return (nearest[:, :-1] == tokens[:, 1:]).mean()

  assert hits(with_circuit) > 0.4
  assert hits(plain) < 0.01


def test_the_right_next_token_becomes_likelier_and_no_other_place(
  plain, with_circuit, tokens
):
  before, after = (
    np.asarray(logits_of_the_next(params, tokens))
    for params in (plain, with_circuit)
  )

  def gain(shift):
    """Nats won for the token `shift` places behind the one just written."""
    chosen = np.roll(tokens, -shift, axis=1)[:, :-1]
    return mean_log_prob(after, chosen) - mean_log_prob(before, chosen)

  assert gain(1) > 1.0
  assert max(gain(-1), gain(0), gain(2), gain(7)) < 0.5


def test_only_the_first_layers_attention_and_the_bias_change(
  plain, with_circuit
):
  changed = {
    "/".join(entry.key for entry in path)
    for (path, old), (_, new) in zip(
      jax.tree_util.tree_leaves_with_path(plain),
      jax.tree_util.tree_leaves_with_path(with_circuit),
      strict=True,
    )
    if not np.array_equal(old, new)
  }
  own = "encoder/layers_0/attention"
  cross = "decoder/layers_0/encoder_decoder_attention"
  assert changed == {
    "encoder/relpos_bias/rel_embedding",
    f"{own}/value/kernel",
    f"{own}/out/kernel",
    *(f"{cross}/{name}/kernel" for name in ("query", "key", "value", "out")),
  }


def test_the_given_parameters_stay_as_they_are(plain):
  before = jax.tree.map(np.array, plain)
  copy_circuit.add(plain, DEMO, jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, before, plain)


def test_half_of_the_heads_keep_their_fresh_kernels(plain, with_circuit):
  half = DEMO.emb_dim // 2
  old = plain["decoder"]["layers_0"]["encoder_decoder_attention"]
  new = with_circuit["decoder"]["layers_0"]["encoder_decoder_attention"]
  for name in ("query", "key"):
    kernels = old[name]["kernel"], new[name]["kernel"]
    np.testing.assert_array_equal(kernels[0][:, half:], kernels[1][:, half:])
    assert not np.any(kernels[0][:, :half] == kernels[1][:, :half])


def test_the_key_decides_the_rotations(plain, with_circuit):
  again = copy_circuit.add(plain, DEMO, jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, again, with_circuit)
  other = copy_circuit.add(plain, DEMO, jax.random.key(2))

  def carried(params):
    layer = params["decoder"]["layers_0"]["encoder_decoder_attention"]
    return layer["key"]["kernel"]

  assert not np.array_equal(carried(other), carried(again))


@pytest.mark.parametrize(
  "change",
  [
    {"head_dim": 16},
    {"logits_via_embedding": False},
    {"num_heads": 1, "head_dim": 128},
  ],
)
def test_shapes_without_room_for_the_circuit_are_refused(plain, change):
  config = dataclasses.replace(DEMO, **change)
  name, value = next(iter(change.items()))
  wanted = "got 64" if name == "head_dim" else f"{name}={value}"
  with pytest.raises(ValueError, match=wanted):
    copy_circuit.add(plain, config, jax.random.key(0))
