"""Checks random keys where they are given, and makes one for each example."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices

__all__ = ["as_argument", "check", "of_examples", "secret_key"]

_WORDS = (2, 4)  # of a raw key: Threefry's and that of other generators


def check(name: str, key: Any) -> tuple[int, ...]:
  """Refuses what is no random key; returns the shape of the array of keys.

  >>> check("key", jax.random.split(jax.random.key(0), 3))
  (3,)

  Args:
    name: of the argument, for the message.
    key: from `jax.random.key` or `jax.random.PRNGKey`, or an array of them.

  Returns:
    () for one key.

  Raises:
    TypeError: if it is something else, as a seed.
  """
  dtype, shape = getattr(key, "dtype", None), jnp.shape(key)
  if dtype is not None and _is_typed(key):
    return shape
  if dtype == jnp.uint32 and shape and shape[-1] in _WORDS:
    return shape[:-1]
  raise TypeError(
    f"expected {name} from jax.random.key(...) or wrap_key_data(...), got"
    f" {type(key).__name__} of shape {shape}: a seed is no key"
  )


def of_examples(key: jax.Array, batch: typing.Batch, size: int) -> jax.Array:
  """Returns a key for each example.

  Args:
    key: one, of the step, from which each example's follows by `fold_in` of its
      "example_id", or of its place where there is none, which tells no two
      devices and no two parts of a step apart; or an array of `size` keys, which
      are taken as they are.
    batch: arrays with a leading axis [batch].
    size: of the batch.

  Raises:
    TypeError: if there is no key.
    ValueError: if there are several, but not one for each example, or one
      alone, without "example_id", inside of `jax.shard_map`.
  """
  shape = check("key", key)
  if shape == (size,):
    return key
  if shape:
    raise ValueError(
      f"expected one key, or an array of ({size},) keys, got keys of shape"
      f" {shape}: give the step's key, and each example gets one of its own"
    )
  if isinstance(batch, Mapping) and "example_id" in batch:
    ids = batch["example_id"]
  elif axes := devices.manual_axes():
    raise ValueError(
      "expected a key for each example, or example_id in the batch, inside of"
      f" shard_map or pmap over {sorted(axes)}, got one key: rows at one place of"
      " two devices would share theirs, and a record that comes or goes change"
      " which do"
    )
  else:
    ids = jnp.arange(size)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def secret_key(secret: int, purpose: str) -> jax.Array:
  """Returns the key of one purpose, from a secret that is kept.

  Keys of different purposes have nothing to do with each other, so one secret
  serves the noise, the dropout and, as `[secret, 1]`, the batches of a training.

  >>> import numpy as np
  >>> secret = np.random.SeedSequence().entropy  # 128 bits: keep, tell nobody
  >>> keys = [secret_key(secret, name) for name in ("noise", "dropout")]
  >>> bool((keys[0] == keys[1]).all())
  False

  Args:
    secret: not negative; as unknown to others as the noise has to be.
    purpose: such as "noise".

  Returns:
    A key of JAX's default generator.
  """
  words = np.random.SeedSequence([secret, *purpose.encode()])
  shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
  state = jnp.asarray(words.generate_state(shape[0]))
  return jax.random.wrap_key_data(state)


def as_argument(keys: Any) -> tuple[Any, Callable[[Any], Any]]:
  """Returns keys as words that a compiled program takes, and the way back.

  A key that a compiled function closes over is a constant of its program, and
  stands wherever that is kept: in a persistent compilation cache, in dumps.

  >>> key = jax.random.key(5)
  >>> words, restored = as_argument(key)
  >>> jitted = jax.jit(lambda words: jax.random.bits(restored(words)))
  >>> bool(jitted(words) == jax.random.bits(key))
  True

  Args:
    keys: a tree of keys, typed or raw.

  Returns:
    NumPy arrays, and the function from them, traced or not, to the keys.
  """

  def of_words(key: jax.Array, data: jax.Array) -> jax.Array:
    if not _is_typed(key):
      return jnp.asarray(data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

  words = jax.tree.map(
    lambda key: np.asarray(jax.random.key_data(key) if _is_typed(key) else key),
    keys,
  )
  return words, lambda words: jax.tree.map(of_words, keys, words)


def _is_typed(key: jax.Array) -> bool:
  return jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
