"""Checks random keys and derives one for each example."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing
from synthq_jax.optim.bookkeeping import devices

__all__ = [
  "as_argument",
  "check",
  "derive_example_keys",
  "log_guessable",
  "secret_key",
]

_log = logging.getLogger(__name__)
_WORDS = (2, 4)  # words of a raw key: of Threefry, and of other generators


def check(name: str, key: Any) -> tuple[int, ...]:
  """Returns the shape of an array of random keys; refuses anything else.

  >>> check("key", jax.random.split(jax.random.key(0), 3))
  (3,)

  Args:
    name: name of the argument, for the message.
    key: from `jax.random.key` or `jax.random.PRNGKey`, or an array of them.

  Returns:
    () for one key.

  Raises:
    TypeError: if `key` is no random key, for example a seed.
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


def derive_example_keys(
  key: jax.Array, batch: typing.Batch, size: int
) -> jax.Array:
  """Returns a key for each example.

  Args:
    key: one key of the step, or an array of `size` keys, which is returned as
      it is. From one key, an example's key is `fold_in` of its "example_id".
      Without that field it is `fold_in` of the position, which does not
      distinguish the devices or the parts of a step.
    batch: arrays with a leading axis [batch].
    size: number of examples.

  Raises:
    TypeError: if `key` is no random key.
    ValueError: if there are several keys, but not one for each example; or one
      key and no "example_id" inside of `jax.shard_map`.
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
    if jnp.shape(ids) != (size,):
      raise ValueError(
        f"expected one example_id for each of {size} examples, got shape"
        f" {jnp.shape(ids)}: of grouped users, leave those of records out"
      )
  elif axes := devices.get_manual_axes():
    raise ValueError(
      "expected a key for each example, or example_id in the batch, inside of"
      f" shard_map or pmap over {sorted(axes)}, got one key: rows at one position"
      " of two devices would share a key, and adding or removing a record would"
      " change which do"
    )
  else:
    ids = jnp.arange(size)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def log_guessable(key: Any) -> None:
  """Logs a noise key that was made of a small seed, once.

  `jax.random.key(seed)` of a seed below 2^32 has a first word of 0, which one
  random key in 2^32 has.

  Args:
    key: one key; nothing is seen of a traced one.
  """
  if isinstance(key, jax.core.Tracer):
    return
  with jax.ensure_compile_time_eval():
    words = np.ravel(jax.random.key_data(key) if _is_typed(key) else key)
  if not words[0]:
    _log_guessable()


@functools.cache
def _log_guessable() -> None:
  _log.warning(
    "the noise key follows from a seed below 2^32: whoever tries all seeds can"
    " subtract the noise; for private records take optim.secret_key("
    "numpy.random.SeedSequence().entropy, 'noise')"
  )


def secret_key(secret: int, purpose: str) -> jax.Array:
  """Derives the key of one purpose from a secret.

  Keys of different purposes are unrelated, so one secret serves the noise, the
  dropout and, as `[secret, 1]`, the batches of a training.

  >>> import numpy as np
  >>> secret = np.random.SeedSequence().entropy  # 128 bits: keep, tell nobody
  >>> keys = [secret_key(secret, name) for name in ("noise", "dropout")]
  >>> bool((keys[0] == keys[1]).all())
  False

  Args:
    secret: integer >= 0, to be kept as secret as the noise; one below 2^32 is
      logged, once.
    purpose: such as "noise".

  Returns:
    A key of JAX's default generator.
  """
  if np.size(secret) == 1 and np.max(secret) < 2**32:
    _log_guessable()
  words = np.random.SeedSequence([secret, *purpose.encode()])
  shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
  state = jnp.asarray(words.generate_state(shape[0]))
  return jax.random.wrap_key_data(state)


def as_argument(keys: Any) -> tuple[Any, Callable[[Any], Any]]:
  """Converts keys to arrays that a compiled program takes as arguments.

  A key that a compiled function closes over is a constant of its program. It is
  stored wherever the program is: in a persistent compilation cache, in dumps.

  >>> key = jax.random.key(5)
  >>> words, restored = as_argument(key)
  >>> jitted = jax.jit(lambda words: jax.random.bits(restored(words)))
  >>> bool(jitted(words) == jax.random.bits(key))
  True

  Args:
    keys: a tree of keys, typed or raw.

  Returns:
    NumPy arrays, and the function that restores the keys from them, traced or
    not.
  """

  def restore(key: jax.Array, data: jax.Array) -> jax.Array:
    if not _is_typed(key):
      return jnp.asarray(data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

  words = jax.tree.map(
    lambda key: np.asarray(jax.random.key_data(key) if _is_typed(key) else key),
    keys,
  )
  return words, lambda words: jax.tree.map(restore, keys, words)


def _is_typed(key: jax.Array) -> bool:
  return jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
