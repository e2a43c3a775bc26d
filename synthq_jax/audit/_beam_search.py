"""The most likely text given memory states: beam search with T5's cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from synthq_jax import typing
from synthq_jax.models import t5, t5_config

__all__ = ["search"]

_PAD = 0
_EOS = 1


class _State(NamedTuple):
  """Beams so far; a row's beams stand side by side in the cache."""

  position: Array  # []
  cache: t5.DecodeCache
  written: Array  # [row, beam, max_length]
  scores: Array  # [row, beam], log-probabilities
  token: Array  # [row, beam], the last one
  ended: Array  # [row, beam]


@functools.partial(jax.jit, static_argnames=("config", "max_length", "beams"))
def search(
  params: typing.Params,
  memory: Float[Array, "row memory dim"],
  *,
  config: t5_config.T5Config,
  max_length: int,
  beams: int,
) -> Int[Array, "row max_length"]:
  """Writes the best text that a beam search finds for each row.

  Scores are log-probabilities of whole texts, EOS included, without any
  correction for length: what an attacker wants is the likeliest text. One beam
  is greedy decoding.

  Args:
    params: "token_embedder" and "decoder" of a T5.
    memory: what the decoder attends to in place of an encoder's output.
    config: the shape of the T5; not scanned.
    max_length: tokens at most, EOS included.
    beams: texts kept at each step, at least 1.

  Returns:
    Tokens, with EOS where a text ended and 0 after it.
  """

  def unfinished(state: _State):
    return (state.position < max_length) & ~jnp.all(state.ended)

  def step(state: _State):
    logits, cache = _apply(
      params,
      config,
      "decode_step",
      state.token.reshape(-1),
      state.cache,
      state.position,
    )
    logs = _log_probabilities(logits.reshape(len(memory), beams, -1), state)
    totals = (state.scores[:, :, None] + logs).reshape(len(memory), -1)
    scores, chosen = jax.lax.top_k(totals, beams)
    source, token = jnp.divmod(chosen, logs.shape[-1])
    written = _of_beams(state.written, source)
    ended = _of_beams(state.ended, source) | (token == _EOS)
    return _State(
      state.position + 1,
      _reordered(cache, source),
      written.at[:, :, state.position].set(token),
      scores,
      token,
      ended,
    )

  last = jax.lax.while_loop(
    unfinished, step, _start(params, memory, config, max_length, beams)
  )
  return last.written[:, 0]  # top_k sorts: the first beam is the best


def _start(params, memory, config, max_length: int, beams: int) -> _State:
  rows = len(memory)
  crossed = _apply(params, config, _cross, memory)
  mask = jnp.ones((rows, 1, 1, memory.shape[1]), bool)
  cache = t5.empty_cache(config, t5.Inputs(crossed, mask), max_length, beams)
  # All beams begin alike: only the first may go on, or they would stay so.
  scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
  zeros = jnp.zeros((rows, beams), jnp.int32)
  return _State(
    position=jnp.int32(0),
    cache=cache,
    written=jnp.zeros((rows, beams, max_length), jnp.int32),
    scores=jnp.broadcast_to(scores, (rows, beams)),
    token=zeros,
    ended=zeros > 0,
  )


def _cross(transformer: t5.Transformer, memory):
  return transformer.decoder.cross(memory)


def _apply(params, config, method, *args):
  return t5.Transformer(config).apply({"params": params}, *args, method=method)


def _log_probabilities(
  logits: Float[Array, "row beam vocab"], state: _State
) -> Float[Array, "row beam vocab"]:
  """Padding is never written, and all that follows an end."""
  is_pad = jnp.broadcast_to(jnp.arange(logits.shape[-1]) == _PAD, logits.shape)
  logs = jax.nn.log_softmax(jnp.where(is_pad, -jnp.inf, logits))
  after_end = jnp.where(is_pad, 0.0, -jnp.inf)
  return jnp.where(state.ended[:, :, None], after_end, logs)


def _of_beams(values: Array, source: Int[Array, "row beam"]) -> Array:
  """Returns the values [row, beam, ...] of the beams that were gone on with."""
  index = source.reshape(*source.shape, *(1,) * (values.ndim - 2))
  return jnp.take_along_axis(values, index, axis=1)


def _reordered(cache: t5.DecodeCache, source) -> t5.DecodeCache:
  def reorder(leaf):
    parts = leaf.reshape(*source.shape, *leaf.shape[1:])
    return _of_beams(parts, source).reshape(leaf.shape)

  return cache._replace(own=jax.tree.map(reorder, cache.own))
