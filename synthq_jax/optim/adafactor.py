"""T5's Adafactor as a chain of optax transforms."""

import jax
import jax.numpy as jnp
import optax

__all__ = ["adafactor"]


def adafactor(
  learning_rate: optax.ScalarOrSchedule,
  *,
  multiply_by_parameter_scale: bool = True,
  decay_rate: float = 0.8,
  step_offset: int = 0,
  clipping_threshold: float | None = 1.0,
  factored: bool = True,
  min_dim_size_to_factor: int = 128,
  epsilon1: float = 1e-30,
  epsilon2: float = 1e-3,
  momentum: float | None = None,
  weight_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds Adafactor with the update and the defaults of T5X.

  Second moments are kept in float32 whatever the parameters' dtype, as the
  means over rows and columns where a parameter's two largest axes are long
  enough. Unlike T5X, a parameter of more than two axes needs no rule: its two
  largest axes are factored.

  >>> import jax.numpy as jnp
  >>> transform = adafactor(0.1)
  >>> params = {"w": jnp.array([2.0, -2.0])}
  >>> state = transform.init(params)
  >>> updates, _ = transform.update({"w": jnp.array([5.0, -1.0])}, state, params)
  >>> print(updates["w"])
  [-0.2  0.2]

  Args:
    learning_rate: a number or a function of the step; relative to each
      parameter's scale if `multiply_by_parameter_scale`.
    multiply_by_parameter_scale: whether to multiply each update by the root
      mean square of its parameter.
    decay_rate: exponent c of the decay 1 - t^-c of second moments, t = 1, 2...
    step_offset: the step that counts as the first for the decay: 0, since the
      state starts fresh, unless a state is carried over from pre-training.
    clipping_threshold: largest root mean square of an update before it is
      scaled, or None.
    factored: whether to factor second moments at all.
    min_dim_size_to_factor: smallest second largest axis that is factored.
    epsilon1: added to squared gradients.
    epsilon2: smallest scale of a parameter.
    momentum: decay of an average of updates, or None.
    weight_decay: part of each parameter that is removed in each step
      (not times the learning rate), or None.

  Returns:
    An optax transform whose `update` needs the parameters.

  Raises:
    ValueError: if a number is out of its range.

  References:
    Shazeer and Stern (2018), arXiv:1804.04235, algorithms 4 and 6.
  """
  if decay_rate <= 0:
    raise ValueError(f"expected decay_rate > 0, got {decay_rate=}")
  if clipping_threshold is not None and clipping_threshold <= 0:
    raise ValueError(
      f"expected clipping_threshold > 0 or None, got {clipping_threshold=}"
    )
  if momentum is not None and not 0 <= momentum < 1:
    raise ValueError(f"expected momentum in [0, 1) or None, got {momentum=}")
  parts = [
    optax.scale_by_factored_rms(
      factored=factored,
      decay_rate=decay_rate,
      step_offset=step_offset,
      min_dim_size_to_factor=min_dim_size_to_factor,
      epsilon=epsilon1,
    )
  ]
  if clipping_threshold is not None:
    parts.append(optax.clip_by_block_rms(clipping_threshold))
  if multiply_by_parameter_scale:
    parts.append(optax.scale_by_param_block_rms(epsilon2))
  parts.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
  if momentum is not None:
    parts.append(optax.ema(momentum, debias=False))
  if weight_decay is not None:
    parts.append(optax.add_decayed_weights(weight_decay))
  return _in_float32(optax.chain(*parts, optax.scale(-1.0)))


def _in_float32(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Runs a transform on float32 copies of gradients and parameters."""

  def cast(tree: optax.Params) -> optax.Params:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

  def init_fn(params: optax.Params) -> optax.OptState:
    return inner.init(cast(params))

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    if params is None:
      raise ValueError("expected params in adafactor's update, got None")
    return inner.update(cast(updates), state, cast(params), **extra)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
