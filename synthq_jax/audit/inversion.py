"""Embedding inversion: reading sentences out of the vectors that are exchanged.

The attacker sees vectors that a client sends and wants the client's text. It has
text of its own, the same encoder, and knows what is done to vectors before they
are sent; so it trains a decoder on pairs of its own sentences and their vectors,
sent in the same way. The decoder is T5's: a linear map turns a vector into a few
memory states, and the decoder attends to them where a T5 attends to its
encoder's output. How well it reads the client's vectors is measured beside a
decoder that was trained the same way with the vector hidden::

  inverter = inversion.Inverter(model=config, vector_dim=128)
  start = inverter.init(t5_params, sent, key)
  params = inversion.train(inverter, start, vectors, tokens,
                           noise=.1, recipe=recipe, ...)
  reader = inversion.log_likelihoods(inverter, params, sent, tokens)
  text = inversion.write(inverter, params, sent, max_length=32)

`inversion_measures` compares the two decoders, `vector_secrets` plants secrets
and ranks them, `vector_bounds` has what no attacker can exceed.

Formal statement:
  What is shown is a LOWER bound on what the vectors give away: this attacker,
  with this much text and training, reads that much. A larger model, more text
  or a better idea may read more, so a decoder that reads nothing proves
  nothing. Only noise does: the bounds of `vector_bounds` hold for every
  attacker, and the PrivacyStatement of the exchange for every record. All that
  is computed from a client's vectors and text is as private as these.

References:
  Song and Raghunathan, "Information Leakage in Embedding Models", CCS 2020.
  Li, Xu and Song, "Sentence Embedding Leaks More Information than You Expect:
  Generative Embedding Inversion Attack to Recover the Whole Sentence",
  Findings of ACL 2023.
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

from synthq_jax import checks, typing
from synthq_jax.audit import membership
from synthq_jax.generation import decoding
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config
from synthq_jax.training import loop
from synthq_jax.training import recipe as recipe_lib

__all__ = [
  "Inverter",
  "log_likelihoods",
  "send",
  "train",
  "write",
]

_DECODER = ("token_embedder", "decoder")
_READER = "reader"
_SCALE = 0.1
"""Of fresh memory states: large ones would first drown what the decoder knows."""
_ROWS = 64  # written at once, which changes memory and speed only


@functools.partial(jax.jit, static_argnames=("noise",))
def _sent(vectors, key, *, noise: float | None):
  if noise is None:
    return jnp.zeros_like(vectors)
  return vectors + noise * jax.random.normal(key, vectors.shape, vectors.dtype)


def send(
  noise: float | None,
  vectors: Float[np.ndarray, "row dim"],
  key: Key[Array, ""],
) -> Float[np.ndarray, "row dim"]:
  """Returns what is sent for true vectors.

  Who receives a vector k times, each time with noise of its own, knows it as
  well as from one with this standard deviation over sqrt(k): audit that.

  Args:
    noise: standard deviation of the noise of each coordinate; None hides the
      vectors (zeros), for the decoder that others are compared with.
    vectors: of sentences.
    key: of the noise.

  Raises:
    ValueError: if the noise is negative.
  """
  if noise is not None:
    checks.at_least(0, noise=noise)
  return np.asarray(_sent(jnp.asarray(vectors), key, noise=noise), np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inverter:
  """The shape of the attacker's decoder."""

  model: t5_config.T5Config
  """Of the T5 whose decoder it is; `scan_layers` must be False."""
  vector_dim: int
  """Coordinates of a vector as it is sent."""
  memories: int = 8
  """States that a vector is turned into."""

  def __post_init__(self):
    checks.at_least(1, vector_dim=self.vector_dim, memories=self.memories)
    if self.model.scan_layers:
      raise ValueError(
        "expected Inverter.model with scan_layers=False, got True: decoding"
        " reads layer by layer"
      )

  def init(
    self,
    params: typing.Params,
    sent: Float[np.ndarray, "row vector_dim"],
    key: Key[Array, ""],
  ) -> typing.Params:
    """Returns parameters to start from.

    Args:
      params: of a public T5 of this shape, whose decoder is taken; or of this
        inverter's training, whose bias is kept too: a decoder that learned the
        language with vectors hidden goes on where it was.
      sent: vectors of the attacker's own text, as they are sent; coordinates
        are shifted and scaled by their means and deviations.
      key: draws the map.

    Raises:
      ValueError: if the vectors have another dimension.
    """
    sent = _checked(sent, self.vector_dim)
    spread = np.std(sent, axis=0)
    width = self.memories * self.model.emb_dim
    kernel_key, bias_key = jax.random.split(key)
    kernel = jax.random.normal(kernel_key, (self.vector_dim, width))
    # Not zero: hidden vectors would give equal states that stay equal.
    bias = _SCALE * jax.random.normal(bias_key, (width,))
    reader = {
      "center": jnp.asarray(np.mean(sent, axis=0)),
      "spread": jnp.asarray(np.where(spread > 0, spread, 1.0), jnp.float32),
      "kernel": _SCALE * kernel / np.sqrt(self.vector_dim),
      "bias": params.get(_READER, {"bias": bias})["bias"],
    }
    return {name: params[name] for name in _DECODER} | {_READER: reader}

  def memory(
    self, params: typing.Params, sent: Float[Array, "row vector_dim"]
  ) -> Float[Array, "row memory dim"]:
    """Turns vectors into what the decoder attends to."""
    reader = params[_READER]
    # The attacker's own statistics are not trained.
    center, spread = jax.lax.stop_gradient((reader["center"], reader["spread"]))
    scaled = (sent - center[None, :]) / spread[None, :]
    states = scaled @ reader["kernel"] + reader["bias"][None, :]
    return states.reshape(len(sent), self.memories, self.model.emb_dim)

  def losses(
    self,
    params: typing.Params,
    sent: Float[Array, "row vector_dim"],
    tokens: Int[Array, "row length"],
  ) -> Float[Array, " row"]:
    """Returns -log P(sentence | vector) in nats, EOS included."""
    logits = t5.Transformer(self.model).apply(
      {"params": {name: params[name] for name in _DECODER}},
      self.memory(params, sent),
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
  vectors: Float[np.ndarray, "row dim"],
  tokens: Int[np.ndarray, "row length"],
  *,
  noise: float | None,
  recipe: recipe_lib.Recipe,
  files: loop.Files,
) -> typing.Params:
  """Trains the attacker on its own text; goes on from the newest state.

  The noise is fresh in every step, so that the attacker learns the mechanism
  and not one draw of it. Adam minimises nats per token. The same recipe with
  noise=None gives the decoder to compare with.

  Args:
    inverter: the shape.
    params: where to start, from `Inverter.init`.
    vectors: true vectors of the attacker's sentences, by the victims' encoder.
    tokens: these sentences, with EOS, 0 = padding. No victim's text.
    noise: as in `send`.
    recipe: length, batches, learning rate.
    files: where states and metrics go, of this training alone.

  Returns:
    Trained parameters, on the host.

  Raises:
    ValueError: if there are fewer sentences than a batch has, or not as many
      as vectors.
  """
  if len(tokens) != len(vectors):
    raise ValueError(
      "expected as many vectors as sentences, got"
      f" {len(vectors)} and {len(tokens)}: encode them all"
    )
  key = jax.random.key(recipe.seed)
  step_fn = functools.partial(
    _step, inverter=inverter, noise=noise, recipe=recipe
  )
  params = jax.tree.map(jnp.asarray, params)
  state, _ = recipe.train(
    lambda state, batch, step: step_fn(
      state, batch, jax.random.fold_in(key, step)
    ),
    (params, recipe.optimizer().init(params)),
    lambda rows: {"vectors": vectors[rows], "tokens": tokens[rows]},
    len(tokens),
    files,
  )
  return jax.device_get(state)


@functools.partial(jax.jit, static_argnames=("inverter", "noise", "recipe"))
def _step(
  state: Any,
  batch: typing.Batch,
  key: Key[Array, ""],
  *,
  inverter: Inverter,
  noise: float | None,
  recipe: recipe_lib.Recipe,
) -> tuple[Any, dict[str, Array]]:
  """Sends the vectors of a batch anew, and learns from what was sent."""
  sent = _sent(batch["vectors"], key, noise=noise)

  def nats_per_token(params):
    losses = inverter.losses(params, sent, batch["tokens"])
    return jnp.sum(losses) / jnp.sum(batch["tokens"] > 0)

  params, opt_state = state
  loss, grads = jax.value_and_grad(nats_per_token)(params)
  updates, opt_state = recipe.optimizer().update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def log_likelihoods(
  inverter: Inverter,
  params: typing.Params,
  sent: Float[np.ndarray, "row vector_dim"],
  tokens: Int[np.ndarray, "row length"],
  *,
  batch_size: int = 256,
) -> Float[np.ndarray, " row"]:
  """Returns log P(sentence | vector), EOS included, in nats.

  Args:
    inverter: the shape.
    params: from `train`.
    sent: what was sent for each sentence.
    tokens: the sentences, 0 = padding.
    batch_size: sentences at once, which changes memory and speed only.

  Returns:
    float64, at most 0.

  Raises:
    ValueError: if there are not as many vectors as sentences, or a likelihood
      is not finite.
  """
  sent = _checked(sent, inverter.vector_dim)
  if len(sent) != len(tokens):
    raise ValueError(
      f"expected a vector for each sentence, got {len(sent)} vectors and"
      f" {len(tokens)} sentences"
    )
  params = jax.device_put(params)
  return membership.scored(
    lambda rows: -_losses(params, sent[rows], tokens[rows], inverter=inverter),
    len(sent),
    batch_size,
  )


@functools.partial(jax.jit, static_argnames=("inverter",))
def _losses(params, sent, tokens, *, inverter: Inverter):
  return inverter.losses(params, sent, tokens)


def write(
  inverter: Inverter,
  params: typing.Params,
  sent: Float[np.ndarray, "row vector_dim"],
  *,
  max_length: int,
) -> Int[np.ndarray, "row max_length"]:
  """Writes a sentence for each vector, always with the likeliest next token.

  Args:
    inverter: the shape.
    params: from `train`.
    sent: what was sent.
    max_length: tokens at most, EOS included.

  Returns:
    Tokens, with EOS where a sentence ended and 0 after.

  Raises:
    ValueError: if the vectors have another dimension or a number is below 1.
  """
  sent = _checked(sent, inverter.vector_dim)
  checks.at_least(1, max_length=max_length)
  params = jax.device_put(params)
  return membership.in_batches(
    lambda rows: _write(
      params, sent[rows], inverter=inverter, max_length=max_length
    ),
    len(sent),
    _ROWS,
  )


@functools.partial(jax.jit, static_argnames=("inverter", "max_length"))
def _write(params, sent, *, inverter: Inverter, max_length: int):
  decoder = {name: params[name] for name in _DECODER}
  memory = inverter.memory(params, sent)
  crossed = t5.Transformer(inverter.model).apply(
    {"params": decoder}, memory, method=lambda model, x: model.decoder.cross(x)
  )
  mask = jnp.ones((len(memory), 1, 1, memory.shape[1]), bool)
  written = decoding.decode(
    decoder,
    jnp.arange(inverter.model.vocab_size)[None] == decoding.PAD,
    t5.Inputs(crossed, mask),
    jax.random.split(jax.random.key(0), len(memory)),  # greedy: of no effect
    jnp.ones(len(memory), bool),
    config=inverter.model,
    sampler=decoding.Greedy(),
    max_length=max_length,
  )
  return written[:, 0]


def _checked(vectors: np.ndarray, dim: int) -> np.ndarray:
  vectors = np.asarray(vectors, np.float32)
  if vectors.ndim != 2 or vectors.shape[1] != dim or not len(vectors):
    raise ValueError(
      f"expected vectors [row, {dim}] as Inverter.vector_dim says, at least"
      f" one, got shape {vectors.shape}"
    )
  return vectors
