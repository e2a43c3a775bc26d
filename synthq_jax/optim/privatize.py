"""From a clipped sum to a private mean: noise and a public divisor."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthq_jax.optim import noise as noise_lib
from synthq_jax.optim.bookkeeping import devices

__all__ = ["PrivatizeState", "privatize"]


class PrivatizeState(NamedTuple):
  """State of `privatize`."""

  step: jax.Array  # [] int32
  noise: Any = ()  # what correlated noise remembers


def privatize(
  *,
  l2_sensitivity: float,
  noise_multiplier: float,
  denominator: float,
  key: jax.Array,
  noise: noise_lib.Noise | None = None,
) -> optax.GradientTransformation:
  """Builds the transform from a clipped sum to a private mean.

  The update is (sum + noise) / denominator, with noise of standard deviation
  noise_multiplier x l2_sensitivity in every coordinate. The noise of step t is
  a function of the key and t alone, so a resumed run draws the same noise.

  Formal guarantee:
    If `l2_sensitivity` bounds the L2 norm by which one unit moves the incoming
    sum, under ADD_OR_REMOVE_ONE or REPLACE_SPECIAL, each step is a Gaussian
    mechanism with the given noise multiplier for that unit and relation, and
    everything computed from its output is post-processing. `denominator` has
    to be public: a constant such as the expected batch size, never the number
    of examples in this batch. The key has to stay secret and must not be used
    for anything else: step t draws from `fold_in(key, t)`, so another key that
    is a child of this one is this one again: take both from the `split` of a
    third. Gaussians are drawn in float32: attacks on the low bits of
    floating-point noise are outside this claim. It has to see the whole sum:
    what `optax.masked` or `optax.multi_transform` would keep from it is refused,
    as are parts of parameters inside of `jax.shard_map`.

  >>> import jax, jax.numpy as jnp
  >>> transform = privatize(l2_sensitivity=1.0, noise_multiplier=0.0,
  ...                       denominator=4.0, key=jax.random.key(0))
  >>> mean, state = transform.update(jnp.array([8.0]), transform.init(None))
  >>> print(mean, state.step)
  [2.] 1

  Args:
    l2_sensitivity: `grad_fn.sensitivity(ADD_OR_REMOVE_ONE)` of the clipped
      gradient, above 0.
    noise_multiplier: standard deviation of the noise over the sensitivity, at
      least 0; 0 adds none.
    denominator: public divisor, above 0.
    key: secret key, for the noise of all steps and nothing else.
    noise: `iid()` or `banded(...)`; None means `iid()`. Correlated noise asks
      for a sampler that keeps a record's steps apart: see `banded`.

  Returns:
    An optax transform; its state is the step count and that of the noise.

  Raises:
    ValueError: if a number is out of its range; when it is called, if it is
      not given the whole sum in floating-point numbers.

  References:
    Abadi et al. (2016), arXiv:1607.00133, algorithm 1.
  """
  _check_positive("l2_sensitivity", l2_sensitivity)
  _check_positive("denominator", denominator)
  if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
    raise ValueError(
      f"expected noise_multiplier >= 0 and finite, got {noise_multiplier=}"
    )
  noise = noise_lib.iid() if noise is None else noise
  std = noise_multiplier * l2_sensitivity

  def init_fn(params: optax.Params) -> PrivatizeState:
    _check_whole(params)
    return PrivatizeState(jnp.zeros([], jnp.int32), noise.init(params))

  def update_fn(
    updates: optax.Updates,
    state: PrivatizeState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, PrivatizeState]:
    del params
    _check_whole(updates)
    step = optax.safe_increment(state.step)
    total = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
    if std == 0:
      mean = jax.tree.map(lambda x: x / denominator, total)
      return mean, PrivatizeState(step, state.noise)
    drawn, noise_state = noise.draw(key, state.step, updates, state.noise)
    mean = jax.tree.map(lambda x, z: (x + std * z) / denominator, total, drawn)
    return mean, PrivatizeState(step, noise_state)

  return optax.GradientTransformation(init_fn, update_fn)


def _check_whole(tree: Any) -> None:
  """Refuses a tree of which a part is elsewhere, or is no gradient."""
  nodes = jax.tree.leaves(tree, is_leaf=_is_masked)
  if any(_is_masked(node) for node in nodes):
    raise ValueError(
      "expected the whole clipped sum, got one with masked leaves, which would"
      " go on without noise: write optax.chain(privatize(...), masked or"
      " multi_transform of optimizers without privacy)"
    )
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path) or "the parameter"
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"expected floating-point parameters, got {name} of {dtype}: noise"
        " means nothing there; keep it out of params"
      )
  axes = devices.axes_of(tree).union(devices.unseen_axes())
  if axes:
    raise ValueError(
      "expected a whole sum that all devices share, got one that differs, or"
      f" may differ, along the mesh axes {sorted(axes)}: every device would add"
      " the same noise to its part; add the devices' sums (jax.lax.psum) under"
      " check_vma=True, or call privatize outside of jax.shard_map"
    )


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def _check_positive(name: str, value: float) -> None:
  if not (value > 0 and math.isfinite(value)):
    raise ValueError(f"expected {name} > 0 and finite, got {name}={value!r}")
