"""Writes queries for documents: batched, cached, the same in any order.

Every token's key is made from the document's id, the number of the sample and
the step, so a query depends neither on the batch it is written in, nor on the
order, the shard or the point of resumption. A sampler picks the next token from
its logits: a frozen dataclass with one method, `sample(logits, keys)`, which
takes one key per row: a row's token depends on its logits and its key alone.

Nobody waits for the longest query: where a quarter of the documents that are
written for have all of theirs, the next ones are read into their places. Places
of the cache are a ring, in which each query counts its own steps.

No sampler sorts the vocabulary, or looks for where to cut it. A truncated
distribution is drawn from by rejection: a token is drawn from all, and kept if
it is inside the cut, which one sum over more probable tokens tells. If it is
not, no token as improbable can be, so the next draw is among the more probable
ones. Every draw is exact: whatever the set drawn from, those that are kept
follow their weights. With p = 0.8 a row takes 2.2 passes over the vocabulary on
average, and a batch as many as its slowest row.
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
  "Temperature",
  "decode",
  "generate",
]

_THREEFRY = "threefry2x32"
_LANES = 128  # tokens of a block: a row of a TPU's registers
_MOST_ROUNDS = 16  # fillings of all slots in one call: then progress is said

PAD = 0
"""The token that fills rows; never produced. A config's `token_ids` say which one
ends a query."""


class Sampler(Protocol):
  """Picks one token per row; forbidden tokens come with logit -inf."""

  def sample(
    self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]
  ) -> Int[Array, " batch"]:
    """Returns the tokens."""


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Always the most probable token, the first of several."""

  def sample(self, logits, keys):
    del keys
    blocks = _in_blocks(logits)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    lane = jnp.argmax(_take(blocks, block), axis=-1)
    return (block * _LANES + lane).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Temperature:
  """Draws from the softmax of logits / temperature."""

  temperature: float = 1.0
  """Positive; below 1 sharpens the distribution."""

  def __post_init__(self):
    checks.within("(0, inf)", temperature=self.temperature)

  def sample(self, logits, keys):
    table = _table(logits, self.temperature)
    return _draw(table, _all(table), keys)[0]


@dataclasses.dataclass(frozen=True)
class Nucleus:
  """Draws from the fewest tokens that hold a share `p` of the probability.

  Tokens exactly as probable as the last of them are kept with it.

  References:
    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration,
    section 3.1.
  """

  p: float
  """The share of the probability to keep, in (0, 1]."""
  temperature: float = 1.0
  """Positive; applied before the cut."""

  def __post_init__(self):
    checks.within("(0, inf)", temperature=self.temperature)
    checks.within("(0, 1]", p=self.p)

  def sample(self, logits, keys):
    if self.p == 1:  # a sum of weights could round to all of them
      return Temperature(self.temperature).sample(logits, keys)
    table = _table(logits, self.temperature)
    return _draw_inside(table, self._cut(table), keys)

  def _cut(self, table):
    enough = self.p * jnp.sum(_all(table).weights, axis=-1)
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
  """Writes `num_samples` queries for each document.

  Documents are split over the devices, each of which writes on its own: where a
  document's queries have ended, another takes its place.

  Args:
    params: the parameters of the T5.
    config: its shape, and the id that ends a query.
    tokens: the encoder's input for each document, 0 = padding at the end.
    ids: the documents' ids, all different: they choose the randomness.
    key: the key of the whole collection.
    sampler: how the next token is picked.
    max_length: tokens at most, with the EOS; a longer query is cut.
    num_samples: queries per document; more leave the first ones as they are.
    forbidden: tokens never to produce, such as sentinels; padding never is.
    batch_size: queries written at a time, by all devices together; changes the
      speed only (up to float rounding: shapes of batches, and the step at which
      a query begins, move logits by some 1e-7).
    devices: those of this process to use; JAX's default one if not given.
    progress: called with a number of documents whenever so many are written,
      for example `tqdm.tqdm(...).update`.
    encoded: what the encoder makes of `tokens`; None: it is computed.

  Returns:
    Tokens of the queries, int32, with EOS where a query ended and 0 after.

  Raises:
    ValueError: if the arguments don't fit together.

  Formal guarantee:
    Post-processing: the queries are as private as `params` are, for the same
    unit and relation, if `tokens`, `ids` and every other argument are public
    or chosen independently of the private data, and `key` is used nowhere in
    the private training.
  """
  tokens = np.asarray(tokens)
  _check(tokens, ids)
  checks.at_least(
    1, max_length=max_length, num_samples=num_samples, batch_size=batch_size
  )
  keys = _document_keys(key, ids)
  banned = _forbidden_mask(config.vocab_size, forbidden)
  mesh = device_rows.mesh(devices)
  params = device_rows.replicate(params, mesh)
  queries = np.zeros((len(ids), num_samples, max_length), np.int32)
  slots = max(1, batch_size // num_samples // mesh.size)
  documents = mesh.size * slots * _rounds(len(ids), mesh.size * slots)
  # Each device gets every n-th document: all of them have as many, to one.
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


def _rounds(documents: int, slots: int) -> int:
  """Returns how often slots are filled in one call, of few different numbers."""
  return min(_MOST_ROUNDS, 1 << (-(-documents // slots) - 1).bit_length())


def _check(tokens: np.ndarray, ids: Sequence[str]) -> None:
  if tokens.ndim != 2 or len(tokens) != len(ids):
    raise ValueError(
      "tokens must have shape [document, length], one row per id, got shape"
      f" {tokens.shape} and {len(ids)} ids"
    )
  if len(set(ids)) != len(ids):
    raise ValueError(
      f"ids must all be different, got {len(ids) - len(set(ids))} repeated:"
      " equal ids would draw equal queries (num_samples writes several)"
    )


def _document_keys(
  key: Key[Array, ""], ids: Sequence[str]
) -> Key[Array, " document"]:
  """Folds 64 bits of each id's digest into the key."""
  key = _threefry(key)
  digests = [hashlib.sha256(name.encode()).digest()[:8] for name in ids]
  words = np.frombuffer(b"".join(digests), ">u4").astype(np.uint32)
  high, low = words.reshape(-1, 2).T
  fold_in = jax.vmap(jax.random.fold_in)
  return fold_in(jax.vmap(jax.random.fold_in, (None, 0))(key, high), low)


def _threefry(key: Key[Array, ""]) -> Key[Array, ""]:
  """Returns a threefry key: others (rbg) draw by place in the batch."""
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)  # an old-style key
  if str(jax.random.key_impl(key)) == _THREEFRY:
    return key
  data = jax.random.bits(key, (2,), jnp.uint32)
  return jax.random.wrap_key_data(data, impl=_THREEFRY)


def _forbidden_mask(
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
  """Runs `decode` on many documents, every device on those of its own."""
  write = functools.partial(decode, **settings)
  return device_rows.split(write, mesh, whole=2)(*arrays)


class _Slots(NamedTuple):
  """Texts that are being written: those of a document side by side."""

  cache: t5.DecodeCache
  who: Array  # [slot], the document; their number where there is none
  behind: Array  # [slot], tokens that each has written
  keys: Array  # [slot * sample, word], data of its texts' keys
  token: Array  # [slot * sample], the last one
  ended: Array  # [slot * sample]

  @property
  def free(self) -> Array:
    """Where all texts of a document have ended, or there is none."""
    return jnp.all(self.ended.reshape(len(self.who), -1), axis=1)


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
  """Writes texts for documents, until the last has ended; traced by JAX.

  Whenever a quarter of the slots are free, the next documents are read into
  them: a step writes for nearly as many texts as there is room for, whatever
  their lengths are, and nobody waits for the longest.

  Args:
    params: of a T5; "token_embedder" and "decoder" where documents were read.
    banned: tokens that are never written.
    documents: tokens of the encoder [document, length], or what was made of them
      before: `t5.Encoded` or `t5.Inputs`.
    keys: of the documents' randomness.
    real: which documents count; these come first.
    config: the shape of the T5.
    sampler: how the next token is picked.
    max_length: tokens at most, EOS included.
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
    chosen = jax.tree.map(lambda x: x[rows], documents)
    if isinstance(chosen, t5.Inputs):
      return chosen
    read = chosen if isinstance(chosen, t5.Encoded) else (chosen,)
    return _apply(params, config, "read", *read)

  def refill(state):
    first, position, old, written = state
    places = jnp.nonzero(old.free, size=group)[0]
    texts = (places[:, None] * num_samples + samples).reshape(-1)
    next_ = first + jnp.arange(group)
    rows = jnp.minimum(next_, number - 1)
    inputs = jax.tree.map(
      lambda all_, new: all_.at[places].set(new), old.cache.inputs, read(rows)
    )
    fresh = jax.random.key_data(_sample_keys(keys[rows], num_samples))
    new = _Slots(
      cache=old.cache._replace(inputs=inputs),
      who=old.who.at[places].set(jnp.where(next_ < count, next_, number)),
      behind=old.behind.at[places].set(0),
      keys=old.keys.at[texts].set(fresh),
      token=old.token.at[texts].set(0),
      ended=old.ended.at[texts].set(jnp.repeat(next_ >= count, num_samples)),
    )
    return first + group, position, new, written

  def step(state):
    first, position, old, written = state
    behind = jnp.repeat(old.behind, num_samples)
    logits, cache = _apply(
      params, config, "decode_step", old.token, old.cache, position, behind
    )
    logits = jnp.where(jnp.broadcast_to(banned, logits.shape), -jnp.inf, logits)
    step_keys = jax.vmap(jax.random.fold_in)(
      jax.random.wrap_key_data(old.keys, impl=jax.random.key_impl(keys)), behind
    )
    token = jnp.where(old.ended, PAD, sampler.sample(logits, step_keys))
    texts = (old.who[:, None] * num_samples + samples).reshape(-1)
    written = written.at[texts, behind].set(token, mode="drop")
    is_last = (token == config.token_ids.eos) | (behind + 1 == max_length)
    new = old._replace(
      cache=cache,
      behind=old.behind + 1,
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
      who=jnp.full(slots, number),
      behind=jnp.zeros(slots, int),
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


def _sample_keys(
  keys: Key[Array, " document"], num_samples: int
) -> Key[Array, " query"]:
  """Returns the keys of each document's samples, documents outermost."""
  per_document = jax.vmap(jax.random.fold_in, (None, 0))
  per_sample = jax.vmap(per_document, (0, None))
  return per_sample(keys, jnp.arange(num_samples)).reshape(-1)


class _Table(NamedTuple):
  """The vocabulary in blocks: a pass sums lanes, a draw reads one block."""

  logits: Array  # [batch, block, lane]
  weights: Array  # [batch, block, lane], unnormalised probabilities


class _Above(NamedTuple):
  """The tokens with larger logits than `bound`."""

  bound: Array  # [batch]
  weights: Array  # [batch, block], sums of their weights


def _in_blocks(
  logits: Float[Array, "batch vocab"],
) -> Float[Array, "batch block lane"]:
  padding = -logits.shape[-1] % _LANES
  logits = jnp.pad(
    logits.astype(jnp.float32),
    ((0, 0), (0, padding)),
    constant_values=-jnp.inf,
  )
  return logits.reshape(logits.shape[0], -1, _LANES)


def _table(logits: Float[Array, "batch vocab"], temperature: float) -> _Table:
  logits = _in_blocks(logits)
  largest = jnp.max(logits, axis=(1, 2), keepdims=True)
  return _Table(logits, jnp.exp((logits - largest) / temperature))


def _above(table: _Table, bound: Float[Array, " batch"]) -> _Above:
  there = table.logits > bound[:, None, None]
  return _Above(bound, jnp.sum(jnp.where(there, table.weights, 0.0), axis=-1))


def _all(table: _Table) -> _Above:
  return _above(table, jnp.full(table.logits.shape[0], -jnp.inf))


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
    inside: whether the cut keeps the most probable tokens below a bound, told
      from those above it; true if there are none above.
    keys: one per row.

  Returns:
    The tokens; 0 for a row whose logits are not finite.
  """

  def draw_again(state):
    number, token, drawn_from, done = state
    round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    drawn, logit = _draw(table, drawn_from, round_keys)
    token = jnp.where(done, token, drawn)
    above = _above(table, logit)
    return number + 1, token, above, done | inside(above)

  batch, everything = table.logits.shape[0], _all(table)
  # A row of undefined weights is inside no cut: it would be drawn for ever. The
  # largest weight of any other is 1.
  total = jnp.sum(everything.weights, axis=-1)
  is_defined = (total > 0) & jnp.isfinite(total)
  start = (jnp.int32(0), jnp.zeros(batch, jnp.int32), everything, ~is_defined)
  state = jax.lax.while_loop(lambda s: ~jnp.all(s[-1]), draw_again, start)
  return state[1]


def _draw(
  table: _Table, drawn_from: _Above, keys: Key[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
  """Draws a block, then a token of it; returns tokens and their logits.

  Two uniform numbers per row are many times cheaper than one per token.
  """
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(drawn_from.weights, uniform[:, 0])
  logits = _take(table.logits, block)
  there = logits > drawn_from.bound[:, None]
  weights = jnp.where(there, _take(table.weights, block), 0.0)
  lane = _invert(weights, uniform[:, 1])
  logit = jnp.take_along_axis(logits, lane[:, None], axis=1)[:, 0]
  return block * _LANES + lane, logit


def _invert(
  weights: Float[Array, "batch n"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
  """Inverts the distribution: the index where a share `uniform` is reached."""
  cumulative = jnp.cumsum(weights, axis=-1)
  reached = cumulative > uniform[:, None] * cumulative[:, -1:]
  reached &= weights > 0
  # Rounding may leave the very last step unreached.
  fallback = jnp.argmax(weights, axis=-1)
  index = jnp.where(
    jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), fallback
  )
  return index.astype(jnp.int32)
