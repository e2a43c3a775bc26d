"""Candidates: other secrets that a canary could have drawn, and their scores.

The candidates of a canary are a product: some beginnings (all symbols but the
last), each with the same last symbols. A model's next-token probabilities after
one beginning score all candidates with this beginning, so 10,000 candidates are
affordable. Given the product, the secret is equally likely to be any of its
members, so its rank under a model that never saw it is uniform.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import checks, typing
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import membership
from synthq_jax.models import t5, t5_config

__all__ = ["Candidates", "draw", "likelihoods", "with_secrets"]


class Candidates(NamedTuple):
  """A product of beginnings and last symbols; the secret is its first member."""

  heads: Int[np.ndarray, "head symbol"]
  """Beginnings: all symbols but the last; row 0 belongs to the secret."""
  lasts: Int[np.ndarray, " last"]
  """Last symbols; the first belongs to the secret."""

  @property
  def secrets(self) -> Int[np.ndarray, "candidate symbol"]:
    """Every candidate; the last symbol varies fastest."""
    heads = np.repeat(self.heads, len(self.lasts), axis=0)
    lasts = np.tile(self.lasts, len(self.heads))
    return np.concatenate([heads, lasts[:, None]], axis=1)


def draw(
  canary: canaries_lib.Canary,
  alphabet: Int[np.ndarray, " symbol"],
  num: int,
  rng: np.random.Generator,
) -> Candidates:
  """Draws different candidates for a canary, the true secret first.

  Formal guarantee: if the secret is uniform over the strings of its length, it
  is uniform over the candidates given their set. Its rank under a model that
  is independent of it is uniform on 1, ..., num.

  Args:
    canary: canary whose secret comes first.
    alphabet: ids from `canaries.alphabet`, for its kind.
    num: number of candidates, the secret included, at least 2.
    rng: generator that draws the other candidates.

  Returns:
    `num` candidates.

  Raises:
    ValueError: if there are too few secrets of this length.
  """
  checks.at_least(2, num_candidates=num)
  first, last = canary.secret[:-1], canary.secret[-1]
  # One decoded beginning scores all its last symbols: take as many as divide
  # `num`, up to its square root.
  most = min(len(alphabet), math.isqrt(num))
  width = max(k for k in range(1, most + 1) if num % k == 0)
  if num // width > float(len(alphabet)) ** len(first):
    raise ValueError(
      f"expected at most {width * len(alphabet) ** len(first)} candidates in"
      f" groups of {width} for secrets of {len(canary.secret)} symbols out of"
      f" {len(alphabet)}, got num_candidates={num}: take longer secrets"
      " (plan.Canaries.digits) or fewer candidates"
    )
  heads = {first: None}
  while len(heads) < num // width:
    missing = num // width - len(heads)
    for row in rng.choice(alphabet, (missing, len(first))).tolist():
      heads[tuple(row)] = None
  others = rng.permutation(alphabet[alphabet != last])[: width - 1]
  return Candidates(
    np.array(list(heads), np.int32), np.array([last, *others], np.int32)
  )


def with_secrets(
  row: Int[np.ndarray, " length"],
  length: int,
  secrets: Int[np.ndarray, "candidate symbol"],
) -> Int[np.ndarray, "candidate length"]:
  """Copies a row of `canaries.tokenize` for each of other secrets.

  Args:
    row: text, secret, EOS and padding.
    length: symbols of its secret.
    secrets: secrets that replace it, a copy for each.
  """
  end = int(np.sum(row > 0)) - 1
  rows = np.repeat(row[None], len(secrets), axis=0)
  rows[:, end - length : end] = secrets
  return rows


def likelihoods(
  params: typing.Params,
  config: t5_config.T5Config,
  canaries: Sequence[canaries_lib.Canary],
  records: dict[str, Int[np.ndarray, "canary length"]],
  candidates: Sequence[Candidates],
  *,
  batch_size: int = 256,
  progress: Callable[[int], object] | None = None,
) -> Float[np.ndarray, "canary candidate"]:
  """Scores every candidate of every canary, the secret in column 0.

  The score of a secret in the query is its log-likelihood given the document
  and the words before it. The score of a secret in the document is the
  log-likelihood of the whole query given the document.

  Args:
    params: parameters of the generator; copied to the device if needed.
    config: configuration of the generator.
    canaries: all canaries of `records`.
    records: records from `canaries.tokenize`.
    candidates: candidates of each canary, the same number for all.
    batch_size: queries scored at once for secrets in documents.
    progress: function called with 1 after each canary.

  Returns:
    Log-likelihoods in nats.
  """
  params = jax.device_put(params)
  scored = []
  for index, (canary, drawn) in enumerate(
    zip(canaries, candidates, strict=True)
  ):
    source, target = records["inputs"][index], records["targets"][index]
    length = len(canary.secret)
    if canaries_lib.KINDS[canary.kind].side == "query":
      begin = int(np.sum(target > 0)) - 1 - length
      row = _after(params, source[None], target, begin, *drawn, config=config)
    else:
      sources = with_secrets(source, length, drawn.secrets)
      targets = np.repeat(target[None], len(sources), axis=0)
      row = membership.log_likelihoods(
        params, config, sources, targets, batch_size=batch_size
      )
    scored.append(np.asarray(row).ravel())
    if progress is not None:
      progress(1)
  return np.stack(scored)


@functools.partial(jax.jit, static_argnames=("config",))
def _after(
  params: typing.Params,
  source: Int[Array, "1 input"],
  target: Int[Array, " length"],
  begin: Int[Array, ""],
  heads: Int[Array, "head symbol"],
  lasts: Int[Array, " last"],
  *,
  config: t5_config.T5Config,
) -> Float[Array, "head last"]:
  """Returns log P(head, last | document, the target before `begin`)."""

  def apply(method, *args):
    return t5.Transformer(config).apply(
      {"params": params}, *args, method=method
    )

  inputs = apply("read", source)
  shared = jnp.concatenate([jnp.zeros(1, target.dtype), target])

  def read_one(position, cache):
    token = jax.lax.dynamic_slice(shared, (position,), (1,))
    return apply("decode_step", token, cache, position)[1]

  cache = t5.empty_cache(config, inputs, len(target))
  cache = jax.lax.fori_loop(0, begin, read_one, cache)
  # From here every head has its own cache; all share the encoded input.
  own = jax.tree.map(lambda x: jnp.repeat(x, len(heads), axis=0), cache.own)
  cache = t5.DecodeCache(own, inputs)
  tokens = jnp.broadcast_to(shared[begin], (len(heads),))
  total = jnp.zeros(len(heads), jnp.float32)
  for offset in range(heads.shape[1]):
    logits, cache = apply("decode_step", tokens, cache, begin + offset)
    tokens = heads[:, offset]
    total += _get_log_probabilities(logits, tokens[:, None])[:, 0]
  logits, _ = apply("decode_step", tokens, cache, begin + heads.shape[1])
  every = jnp.broadcast_to(lasts, (len(heads), len(lasts)))
  return total[:, None] + _get_log_probabilities(logits, every)


def _get_log_probabilities(
  logits: Float[Array, "head vocab"], tokens: Int[Array, "head choice"]
) -> Float[Array, "head choice"]:
  """Returns the log-probabilities of some next tokens."""
  chosen = jnp.take_along_axis(logits, tokens, axis=-1)
  return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
