"""Generates queries for documents, in batches and with a decoder cache.

The key of every token comes from the document's id, the number of the sample and
the step. So batches, the order of documents, shards and resumption change a query
through the rounding of logits alone. A sampler picks the next token from the
logits. It is a frozen dataclass with one method, `sample(logits, keys)`, which
takes one key per row. A row's token depends on its logits and its key alone.

No slot waits for the longest query. When a quarter of the slots are free, the next
documents are read into them. The positions of the cache are a ring, in which each
query counts its own steps.

No sampler sorts the vocabulary or searches for the cut. Truncated distributions use
rejection sampling: a token is drawn from all tokens and accepted if it is inside
the cut, which one sum over more probable tokens decides. If it is rejected, all
tokens that are at most as probable are outside, too, so the next draw is among the
more probable ones. Every draw is exact: whatever the set drawn from, accepted
tokens follow their weights. With p = 0.8 a row takes 2.2 passes over the vocabulary
on average, and a batch as many as its slowest row.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from synthq_jax import checks, typing
from synthq_jax.models import device_rows, length_batches, t5, t5_config

__all__ = [
  "PAD",
  "Greedy",
  "Nucleus",
  "Sampler",
  "decode",
  "generate",
]

_THREEFRY = "threefry2x32"
_LANES = 128  # tokens of a block: a row of a TPU's registers
_MOST_ROUNDS = (
  16  # fills of all slots in one call; progress is shown after a call
)

PAD = 0
"""The padding token, which is never produced. The end of a query (EOS) is in a
config's `token_ids`."""


class Sampler(Protocol):
  """Picks one token per row; forbidden tokens have logit -inf."""

  def sample(
    self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]
  ) -> Int[Array, " batch"]:
    """Samples one token per row."""


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Picks the most probable token; of equally probable ones, the first."""

  def sample(self, logits, keys):
    del keys
    blocks = _split_blocks(logits)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    lane = jnp.argmax(_take(blocks, block), axis=-1)
    return (block * _LANES + lane).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Nucleus:
  """Draws from the smallest set of tokens with a share `p` of the probability.

  Tokens that are exactly as probable as the last token of the set belong to it.

  References:
    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration,
    section 3.1.
  """

  p: float
  """The share of the probability to keep, in (0, 1]; 1 cuts nothing."""
  temperature: float = 1.0
  """The temperature, positive, applied before the cut; below 1 sharpens the
  distribution."""

  def __post_init__(self):
    checks.within("(0, inf)", temperature=self.temperature)
    checks.within("(0, 1]", p=self.p)

  def sample(self, logits, keys):
    table = _make_table(logits, self.temperature)
    if self.p == 1:  # a partial sum of weights could round to the total
      return _draw(table, _select_all(table), keys)[0]
    return _draw_inside(table, self._make_cut(table), keys)

  def _make_cut(self, table):
    enough = self.p * jnp.sum(_select_all(table).weights, axis=-1)
    return lambda above: jnp.sum(above.weights, axis=-1) < enough


def generate(
  params: typing.Params,
  config: t5_config.T5Config,
  tokens: Int[np.ndarray, "document length"],
  *,
  ids: Sequence[str],
  key: Key[Array, ""],
  sampler: Sampler = Nucleus(p=0.8),  # noqa: B008
  max_length: int,
  num_samples: int = 1,
  forbidden: Sequence[int] = (),
  batch_size: int = 64,
  devices: Sequence[jax.Device] | None = None,
  progress: Callable[[int], object] | None = None,
  encoded: Float[np.ndarray, "document length dim"] | None = None,
) -> Int[np.ndarray, "document num_samples max_length"]:
  """Generates `num_samples` queries for each document.

  Documents are split over the devices, and each device works on its own. When all
  queries of a document have ended, another document takes its slot.

  Args:
    params: the parameters of the T5.
    config: its shape and token ids.
    tokens: the encoder's input for each document, 0 = padding at the end.
    ids: the documents' ids, all different: they select the randomness.
    key: the key of the whole collection.
    sampler: picks the next token.
    max_length: the most tokens of a query, with the EOS; longer queries are cut.
    num_samples: queries per document; a larger number keeps the first ones.
    forbidden: tokens never to produce, such as sentinels; padding is forbidden
      anyway.
    batch_size: queries generated at a time, by all devices together. It changes
      the speed, and logits by some 1e-7: shapes of batches, and the step at which
      a query begins, change rounding.
    devices: the devices of this process to use; None: JAX's default device.
    progress: called with a number of documents when their queries are done, for
      example `tqdm.tqdm(...).update`.
    encoded: the encoder's output for `tokens`; None: it is computed.

  Returns:
    Tokens of the queries, int32, with EOS where a query ended and 0 after.

  Raises:
    ValueError: if the arguments don't fit together.

  Formal guarantee:
    Post-processing: the queries are as private as `params`, for the same unit and
    relation. This holds if `tokens`, `ids` and every other argument are public or
    chosen independently of the private data. It also requires that the private
    training does not use `key`.
  """
  tokens = np.asarray(tokens)
  _check_ids(tokens, ids, config.vocab_size)
  checks.at_least(
    1, max_length=max_length, num_samples=num_samples, batch_size=batch_size
  )
  keys = _make_document_keys(key, ids)
  banned = _make_forbidden_mask(config.vocab_size, forbidden)
  mesh = device_rows.mesh(devices)
  params = device_rows.replicate(params, mesh)
  queries = np.zeros((len(ids), num_samples, max_length), np.int32)
  slots = max(1, batch_size // num_samples // mesh.size)
  rounds = _count_rounds(len(ids), mesh.size * slots)
  documents = mesh.size * slots * rounds
  # Device i gets every n-th document, so that numbers differ by at most one.
  spread = np.arange(documents).reshape(-1, mesh.size).T.reshape(-1)
  for batch in length_batches.split(tokens, documents):
    count = len(batch.rows)
    real = spread < count
    rows = np.resize(batch.rows, documents)[spread]
    read: Any = batch.tokens[spread]
    if encoded is not None:
      read = t5.Encoded(read, encoded[rows, : read.shape[1]])
    written = _write(
      params,
      banned,
      read,
      keys[rows],
      real,
      config=config,
      sampler=sampler,
      max_length=max_length,
      num_samples=num_samples,
      slots=slots,
      mesh=mesh,
    )
    queries[batch.rows[spread[real]]] = np.asarray(written)[real]
    if progress is not None:
      progress(count)
  return queries


def _count_rounds(documents: int, slots: int) -> int:
  """Returns the fills of all slots in one call: a power of two, at most 16."""
  return min(_MOST_ROUNDS, 1 << (-(-documents // slots) - 1).bit_length())


def _check_ids(tokens: np.ndarray, ids: Sequence[str], vocab_size: int) -> None:
  if tokens.ndim != 2 or len(tokens) != len(ids):
    raise ValueError(
      "tokens must have shape [document, length], one row per id, got shape"
      f" {tokens.shape} and {len(ids)} ids"
    )
  first, last = tokens.min(initial=0), tokens.max(initial=0)
  if first < 0 or last >= vocab_size:  # embeddings of others are NaN
    raise ValueError(
      f"tokens must lie in [0, {vocab_size}), the rows of the model's embedding,"
      f" got {first} to {last}: tokenize with the vocabulary of the model"
    )
  if not all(isinstance(name, str) for name in ids):
    raise ValueError("ids must be texts, got others: pass [*map(str, ids)]")
  if len(set(ids)) != len(ids):
    raise ValueError(
      f"ids must all be different, got {len(ids) - len(set(ids))} repeated:"
      " equal ids would draw equal queries (num_samples writes several)"
    )


def _make_document_keys(
  key: Key[Array, ""], ids: Sequence[str]
) -> Key[Array, " document"]:
  """Makes a key per document: folds 64 bits of the id's digest into the key."""
  key = _to_threefry(key)
  digests = [hashlib.sha256(name.encode()).digest()[:8] for name in ids]
  words = np.frombuffer(b"".join(digests), ">u4").astype(np.uint32)
  high, low = words.reshape(-1, 2).T
  fold_in = jax.vmap(jax.random.fold_in)
  return fold_in(jax.vmap(jax.random.fold_in, (None, 0))(key, high), low)


def _to_threefry(key: Key[Array, ""]) -> Key[Array, ""]:
  """Returns a threefry key; draws of other kinds (rbg) depend on the batch."""
  if not hasattr(key, "dtype"):
    raise ValueError(f"key must be jax.random.key(SEED), got {key!r:.20}")
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)  # an old-style key
  if str(jax.random.key_impl(key)) == _THREEFRY:
    return key
  data = jax.random.bits(key, (2,), jnp.uint32)
  return jax.random.wrap_key_data(data, impl=_THREEFRY)


def _make_forbidden_mask(
  vocab_size: int, forbidden: Sequence[int]
) -> Bool[np.ndarray, "1 vocab"]:
  banned = np.zeros((1, vocab_size), bool)
  banned[0, PAD] = True
  for token in forbidden:
    if not 0 <= token < vocab_size:
      raise ValueError(
        f"forbidden tokens must lie in [0, {vocab_size}), got {token}"
      )
    banned[0, token] = True
  if banned.all():
    raise ValueError("forbidden must leave a token to produce, got all")
  return banned


def _apply(params, config: t5_config.T5Config, method: str, *args):
  return t5.Transformer(config).apply({"params": params}, *args, method=method)


@functools.partial(
  jax.jit,
  static_argnames=(
    "config", "sampler", "max_length", "num_samples", "slots", "mesh",
  ),
)  # fmt: skip
def _write(
  *arrays: Any, mesh: jax.sharding.Mesh, **settings: Any
) -> Int[Array, "document num_samples max_length"]:
  """Runs `decode` on many documents, each device on its own documents."""
  write = functools.partial(decode, **settings)
  return device_rows.split(write, mesh, num_replicated=2)(*arrays)


class _Slots(NamedTuple):
  """Unfinished texts, one document per slot, its samples side by side."""

  cache: t5.DecodeCache
  document: Array  # [slot], the document's row; the number of rows if empty
  length: Array  # [slot], the number of tokens written so far
  keys: Array  # [slot * sample, word], data of the texts' keys
  token: Array  # [slot * sample], the last token
  ended: Array  # [slot * sample]

  @property
  def free(self) -> Array:
    """Mask of slots without an unfinished text, bool [slot]."""
    return jnp.all(self.ended.reshape(len(self.document), -1), axis=1)


def decode(
  params: typing.Params,
  banned: Bool[Array, "1 vocab"],
  documents: Any,
  keys: Key[Array, " document"],
  real: Bool[Array, " document"],
  *,
  config: t5_config.T5Config,
  sampler: Sampler,
  max_length: int,
  num_samples: int = 1,
  slots: int | None = None,
) -> Int[Array, "document num_samples max_length"]:
  """Generates texts for documents until all texts have ended; traced by JAX.

  Whenever a quarter of the slots are free, the next documents are read into them.
  So a step fills nearly all slots, whatever the lengths of texts, and no slot waits
  for the longest text.

  Args:
    params: parameters of a T5; "token_embedder" and "decoder" are enough unless
      `documents` are tokens.
    banned: mask of tokens that are never written.
    documents: encoder tokens [document, length], or the results of reading them:
      `t5.Encoded` or `t5.Inputs`.
    keys: a key per document.
    real: mask of documents that are no padding; these come first.
    config: the shape of the T5.
    sampler: picks the next token.
    max_length: the most tokens of a text, EOS included.
    num_samples: texts for each document.
    slots: documents at a time; None: all.

  Returns:
    Tokens, with EOS where a text ended and 0 after.
  """
  number, count = len(real), jnp.sum(real)
  slots = min(slots or number, number)
  group = -(-slots // 4) if slots < number else slots
  samples = jnp.arange(num_samples)[None]

  def read(rows):
    inputs = jax.tree.map(lambda x: x[rows], documents)
    if isinstance(inputs, t5.Inputs):
      return inputs
    read = inputs if isinstance(inputs, t5.Encoded) else (inputs,)
    return _apply(params, config, "read", *read)

  def refill(state):
    first, position, old, written = state
    free = jnp.nonzero(old.free, size=group)[0]
    texts = (free[:, None] * num_samples + samples).reshape(-1)
    next_ = first + jnp.arange(group)
    rows = jnp.minimum(next_, number - 1)
    inputs = jax.tree.map(
      lambda all_, new: all_.at[free].set(new), old.cache.inputs, read(rows)
    )
    new_keys = jax.random.key_data(_make_sample_keys(keys[rows], num_samples))
    next_documents = jnp.where(next_ < count, next_, number)
    new = _Slots(
      cache=old.cache._replace(inputs=inputs),
      document=old.document.at[free].set(next_documents),
      length=old.length.at[free].set(0),
      keys=old.keys.at[texts].set(new_keys),
      token=old.token.at[texts].set(0),
      ended=old.ended.at[texts].set(jnp.repeat(next_ >= count, num_samples)),
    )
    return first + group, position, new, written

  def step(state):
    first, position, old, written = state
    length = jnp.repeat(old.length, num_samples)
    logits, cache = _apply(
      params, config, "decode_step", old.token, old.cache, position, length
    )
    logits = jnp.where(jnp.broadcast_to(banned, logits.shape), -jnp.inf, logits)
    step_keys = jax.vmap(jax.random.fold_in)(
      jax.random.wrap_key_data(old.keys, impl=jax.random.key_impl(keys)), length
    )
    token = jnp.where(old.ended, PAD, sampler.sample(logits, step_keys))
    texts = (old.document[:, None] * num_samples + samples).reshape(-1)
    written = written.at[texts, length].set(token, mode="drop")
    is_last = (token == config.token_ids.eos) | (length + 1 == max_length)
    new = old._replace(
      cache=cache,
      length=old.length + 1,
      token=token,
      ended=old.ended | is_last,
    )
    return first, (position + 1) % max_length, new, written

  def is_full(state):
    first, _, now, _ = state
    enough = jnp.sum(now.free) >= group
    return ~jnp.all(now.ended) & ~(enough & (first < count))

  def fill_and_write(state):
    return jax.lax.while_loop(is_full, step, refill(state))

  words = jax.eval_shape(jax.random.key_data, keys[0])
  inputs = jax.eval_shape(read, jnp.zeros(slots, int))
  inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
  state = (
    jnp.int32(0),
    jnp.int32(0),
    _Slots(
      cache=t5.empty_cache(config, inputs, max_length, num_samples),
      document=jnp.full(slots, number),
      length=jnp.zeros(slots, int),
      keys=jnp.zeros((slots * num_samples, *words.shape), words.dtype),
      token=jnp.zeros(slots * num_samples, jnp.int32),
      ended=jnp.ones(slots * num_samples, bool),
    ),
    jnp.zeros((number * num_samples, max_length), jnp.int32),
  )
  *_, written = jax.lax.while_loop(
    lambda state: state[0] < count, fill_and_write, state
  )
  return written.reshape(-1, num_samples, max_length)


def _make_sample_keys(
  keys: Key[Array, " document"], num_samples: int
) -> Key[Array, " query"]:
  """Makes the keys of each document's samples, documents outermost."""
  per_document = jax.vmap(jax.random.fold_in, (None, 0))
  per_sample = jax.vmap(per_document, (0, None))
  return per_sample(keys, jnp.arange(num_samples)).reshape(-1)


class _Table(NamedTuple):
  """Logits and weights in blocks: a pass sums lanes, a draw reads one block."""

  logits: Array  # [batch, block, lane]
  weights: Array  # [batch, block, lane], unnormalised probabilities


class _Above(NamedTuple):
  """The tokens with larger logits than `bound`."""

  bound: Array  # [batch]
  weights: Array  # [batch, block], sums of their weights


def _split_blocks(
  logits: Float[Array, "batch vocab"],
) -> Float[Array, "batch block lane"]:
  padding = -logits.shape[-1] % _LANES
  logits = jnp.pad(
    logits.astype(jnp.float32),
    ((0, 0), (0, padding)),
    constant_values=-jnp.inf,
  )
  return logits.reshape(logits.shape[0], -1, _LANES)


def _make_table(
  logits: Float[Array, "batch vocab"], temperature: float
) -> _Table:
  logits = _split_blocks(logits)
  largest = jnp.max(logits, axis=(1, 2), keepdims=True)
  return _Table(logits, jnp.exp((logits - largest) / temperature))


def _select_above(table: _Table, bound: Float[Array, " batch"]) -> _Above:
  is_above = table.logits > bound[:, None, None]
  weights = jnp.where(is_above, table.weights, 0.0)
  return _Above(bound, jnp.sum(weights, axis=-1))


def _select_all(table: _Table) -> _Above:
  return _select_above(table, jnp.full(table.logits.shape[0], -jnp.inf))


def _take(
  blocks: Float[Array, "batch block lane"], block: Int[Array, " batch"]
) -> Float[Array, "batch lane"]:
  return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _draw_inside(
  table: _Table,
  inside: Callable[[_Above], Bool[Array, " batch"]],
  keys: Key[Array, " batch"],
) -> Int[Array, " batch"]:
  """Draws until each row's token is inside the cut.

  Args:
    table: the vocabulary.
    inside: takes the tokens above a bound, and returns whether tokens at the bound
      are inside the cut; true if there are none above.
    keys: a key per row.

  Returns:
    The tokens; 0 for a row whose sum of weights is not positive and finite.
  """

  def draw_again(state):
    number, token, drawn_from, done = state
    round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    drawn, logit = _draw(table, drawn_from, round_keys)
    token = jnp.where(done, token, drawn)
    above = _select_above(table, logit)
    return number + 1, token, above, done | inside(above)

  batch, everything = table.logits.shape[0], _select_all(table)
  # No cut contains a row of undefined weights: its draws would never end. In all
  # other rows the largest weight is 1.
  total = jnp.sum(everything.weights, axis=-1)
  is_defined = (total > 0) & jnp.isfinite(total)
  start = (jnp.int32(0), jnp.zeros(batch, jnp.int32), everything, ~is_defined)
  state = jax.lax.while_loop(lambda s: ~jnp.all(s[-1]), draw_again, start)
  return state[1]


def _draw(
  table: _Table, drawn_from: _Above, keys: Key[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
  """Draws a block, then a token of the block; returns tokens and their logits.

  Two uniform numbers per row are many times cheaper than one per token.
  """
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(drawn_from.weights, uniform[:, 0])
  logits = _take(table.logits, block)
  is_above = logits > drawn_from.bound[:, None]
  weights = jnp.where(is_above, _take(table.weights, block), 0.0)
  lane = _invert(weights, uniform[:, 1])
  logit = jnp.take_along_axis(logits, lane[:, None], axis=1)[:, 0]
  return block * _LANES + lane, logit


def _invert(
  weights: Float[Array, "batch n"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
  """Inverts the distribution function: finds the index of a share `uniform`."""
  cumulative = jnp.cumsum(weights, axis=-1)
  reached = cumulative > uniform[:, None] * cumulative[:, -1:]
  reached &= weights > 0
  # By rounding, no index may reach the share.
  fallback = jnp.argmax(weights, axis=-1)
  index = jnp.where(
    jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), fallback
  )
  return index.astype(jnp.int32)
