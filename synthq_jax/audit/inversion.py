"""Embedding inversion: a T5 decoder that reconstructs sentences from vectors.

The attacker holds the encoder and text of its own. A linear map turns a vector
into a few memory states, and the decoder attends to them where a T5 attends to
its encoder's output. The reference decoder sees zeros in place of vectors.

Formal statement:
  The result is a LOWER bound on what vectors reveal: a larger model, more text
  or a better idea may read more. Everything computed from a client's vectors and
  text is as private as they are.

References:
  Song and Raghunathan, "Information Leakage in Embedding Models", CCS 2020.
  Morris et al., "Text Embeddings Reveal (Almost) As Much As Text", EMNLP 2023.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from synthq_jax import typing
from synthq_jax.audit import membership
from synthq_jax.generation import decoding
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config
from synthq_jax.training import loop
from synthq_jax.training import recipe as recipe_lib

__all__ = ["Inverter", "log_likelihoods", "train", "write"]

_DECODER = ("token_embedder", "decoder")
_READER = "reader"
_MEMORIES = 8  # memory states for each vector
_SCALE = 0.1
"""Scale of fresh memory states: large ones would first drown what the decoder
knows."""
_ROWS = 64  # sentences written at once; changes memory and speed only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inverter:
  """The shape of the attacker's decoder."""

  model: t5_config.T5Config
  """Configuration of the decoder's T5. `write` needs layers that are not scanned."""
  vector_dim: int
  """Number of coordinates of a vector."""

  def init(
    self,
    params: typing.Params,
    vectors: Float[np.ndarray, "row vector_dim"],
    key: Key[Array, ""],
  ) -> typing.Params:
    """Returns initial parameters.

    Args:
      params: parameters of a public T5 of this shape, or of a trained inverter,
        whose bias is kept.
      vectors: vectors of the attacker's own text; their means and deviations
        standardize the map's input. Zeros for the reference decoder.
      key: key that draws the map.
    """
    spread = np.std(vectors, axis=0)
    width = _MEMORIES * self.model.emb_dim
    kernel_key, bias_key = jax.random.split(key)
    kernel = jax.random.normal(kernel_key, (self.vector_dim, width))
    # Not zero: hidden vectors would give equal states that stay equal.
    bias = _SCALE * jax.random.normal(bias_key, (width,))
    reader = {
      "center": jnp.asarray(np.mean(vectors, axis=0)),
      "spread": jnp.asarray(np.where(spread > 0, spread, 1.0), jnp.float32),
      "kernel": _SCALE * kernel / np.sqrt(self.vector_dim),
      "bias": params.get(_READER, {"bias": bias})["bias"],
    }
    return {name: params[name] for name in _DECODER} | {_READER: reader}

  def memory(
    self, params: typing.Params, vectors: Float[Array, "row vector_dim"]
  ) -> Float[Array, "row memory dim"]:
    """Turns vectors into the memory states that the decoder attends to."""
    reader = params[_READER]
    # The statistics of the attacker's text are constants, not trained.
    center, spread = jax.lax.stop_gradient((reader["center"], reader["spread"]))
    scaled = (vectors - center[None, :]) / spread[None, :]
    states = scaled @ reader["kernel"] + reader["bias"][None, :]
    return states.reshape(len(vectors), _MEMORIES, self.model.emb_dim)

  def losses(
    self,
    params: typing.Params,
    vectors: Float[Array, "row vector_dim"],
    tokens: Int[Array, "row length"],
  ) -> Float[Array, " row"]:
    """Returns -log P(sentence | vector) in nats, EOS included."""
    logits = t5.Transformer(self.model).apply(
      {"params": {name: params[name] for name in _DECODER}},
      self.memory(params, vectors),
      t5.shift_right(tokens),
      method=_logits,
    )
    return seq2seq.cross_entropy(logits, tokens, normalization="sum")


def _logits(transformer: t5.Transformer, memory, tokens):
  """Returns the logits of each next token, teacher-forced."""
  mask = jnp.ones((len(memory), 1, 1, memory.shape[1]), bool)
  x = transformer.decoder(transformer.token_embedder(tokens), memory, mask)
  return transformer.decoder.logits(x, transformer.token_embedder.embedding)


def train(
  inverter: Inverter,
  params: typing.Params,
  vectors: Float[np.ndarray, "row vector_dim"],
  tokens: Int[np.ndarray, "row length"],
  *,
  recipe: recipe_lib.Recipe,
  files: loop.Files,
) -> typing.Params:
  """Trains the attacker on its own text; resumes from the newest checkpoint.

  Args:
    inverter: shape of the decoder.
    params: initial parameters from `Inverter.init`.
    vectors: vectors of the attacker's sentences, by the victims' encoder.
    tokens: these sentences, with EOS, 0 = padding. No victim's text.
    recipe: length, batches, learning rate.
    files: folder of checkpoints and metrics, for this training alone.

  Returns:
    Trained parameters, on the host.
  """
  params = jax.tree.map(jnp.asarray, params)
  state, _ = recipe.train(
    lambda state, batch, step: _step(state, batch, inverter, recipe),
    (params, recipe.optimizer().init(params)),
    lambda rows: {"vectors": vectors[rows], "tokens": tokens[rows]},
    len(tokens),
    files,
  )
  return jax.device_get(state)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _step(
  state: Any,
  batch: typing.Batch,
  inverter: Inverter,
  recipe: recipe_lib.Recipe,
) -> tuple[Any, dict[str, Array]]:
  def nats_per_token(params):
    losses = inverter.losses(params, batch["vectors"], batch["tokens"])
    return jnp.sum(losses) / jnp.sum(batch["tokens"] > 0)

  params, opt_state = state
  loss, grads = jax.value_and_grad(nats_per_token)(params)
  updates, opt_state = recipe.optimizer().update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def log_likelihoods(
  inverter: Inverter,
  params: typing.Params,
  vectors: Float[np.ndarray, "row vector_dim"],
  tokens: Int[np.ndarray, "row length"],
) -> Float[np.ndarray, " row"]:
  """Returns log P(sentence | vector), EOS included, in nats.

  Args:
    inverter: shape of the decoder.
    params: parameters from `train`.
    vectors: vectors, one for each sentence.
    tokens: the sentences, 0 = padding.
  """
  params = jax.device_put(params)
  return membership.score_in_batches(
    lambda rows: -_losses(params, vectors[rows], tokens[rows], inverter),
    len(vectors),
    256,
  )


@functools.partial(jax.jit, static_argnums=3)
def _losses(params, vectors, tokens, inverter: Inverter):
  return inverter.losses(params, vectors, tokens)


def write(
  inverter: Inverter,
  params: typing.Params,
  vectors: Float[np.ndarray, "row vector_dim"],
  *,
  max_length: int,
) -> Int[np.ndarray, "row max_length"]:
  """Writes a sentence for each vector, always with the likeliest next token.

  Args:
    inverter: shape of the decoder.
    params: parameters from `train`.
    vectors: vectors of the sentences.
    max_length: tokens at most, EOS included.

  Returns:
    Tokens; EOS ends a sentence and 0 = padding follows.
  """
  params = jax.device_put(params)
  return membership.apply_in_batches(
    lambda rows: _write(params, vectors[rows], inverter, max_length),
    len(vectors),
    _ROWS,
  )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _write(params, vectors, inverter: Inverter, max_length: int):
  decoder = {name: params[name] for name in _DECODER}
  memory = inverter.memory(params, vectors)
  crossed = t5.Transformer(inverter.model).apply(
    {"params": decoder}, memory, method=lambda model, x: model.decoder.cross(x)
  )
  mask = jnp.ones((len(memory), 1, 1, memory.shape[1]), bool)
  written = decoding.decode(
    decoder,
    jnp.arange(inverter.model.vocab_size)[None] == decoding.PAD,
    t5.Inputs(crossed, mask),
    jax.random.split(jax.random.key(0), len(memory)),  # unused by greedy
    jnp.ones(len(memory), bool),
    config=inverter.model,
    sampler=decoding.Greedy(),
    max_length=max_length,
  )
  return written[:, 0]
