"""Wraps this project's private optimizers for T5X."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from synthq_jax import extras, optim
from synthq_jax.backends.t5x import release as release_lib
from synthq_jax.optim.privatize import PrivatizeState

with extras.required("run"):
  from flax import traverse_util

with extras.required("t5x"):
  from t5x import optimizers

__all__ = [
  "PrivateOptimizer",
  "dp_adafactor",
  "dp_adam",
  "register_states",
  "take_parameters",
]

_RULES = optimizers.OptaxStatePartitionRules


class PrivateOptimizer(optimizers.OptaxWrapper):
  """Adds noise to a clipped SUM and updates parameters with the private mean.

  Attributes:
    release: the release that determines the noise.
    learning_rate: learning rate of a step of this training, counted from 0. T5X's
      wrapper of optax ignores the trainer's learning rate.
    options: the other arguments of the optimizer.
  """

  def __init__(
    self,
    wrapped: optimizers.OptaxWrapper,
    *,
    release: release_lib.Release,
    learning_rate: Callable[[Any], Any],
    options: Mapping[str, Any],
  ):
    super().__init__(wrapped.optax_optimizer)
    self.release = release
    self.learning_rate = learning_rate
    self.options = dict(options)


def dp_adafactor(
  *,
  release: release_lib.Release,
  learning_rate: Callable[[Any], Any] | float,
  **options: Any,
) -> PrivateOptimizer:
  """Makes this project's private Adafactor for T5X; bind it to OPTIMIZER.

  `dp_trainer.DPTrainer` passes clipped sums to it.

  Formal guarantee: the guarantee of `optim.dp_adafactor`, with the release's
  noise.

  Args:
    release: the release, shared with the trainer.
    learning_rate: a number or a schedule, e.g.
      @utils.create_learning_rate_scheduler(), of the steps of this training. T5X's
      own count begins at the step of the initial checkpoint.
    **options: the other arguments of `optim.adafactor`.

  Returns:
    An optimizer for T5X's models.
  """
  return _make_optimizer(optim.dp_adafactor, release, learning_rate, options)


def dp_adam(
  *,
  release: release_lib.Release,
  learning_rate: Callable[[Any], Any] | float,
  **options: Any,
) -> PrivateOptimizer:
  """Makes this project's private Adam for T5X; see `dp_adafactor`.

  Args:
    release: as in `dp_adafactor`.
    learning_rate: as in `dp_adafactor`.
    **options: the other arguments of `optim.dp_adam`.

  Returns:
    An optimizer for T5X's models.
  """
  return _make_optimizer(optim.dp_adam, release, learning_rate, options)


def _make_optimizer(
  make: Callable[..., optax.GradientTransformation],
  release: release_lib.Release,
  learning_rate: Callable[[Any], Any] | float,
  options: dict[str, Any],
) -> PrivateOptimizer:
  """Makes an optimizer with the release's noise and wraps it for T5X."""
  register_states()
  settings = release.settings
  wrapped = optimizers.wrap_optax_optimizer(make)(
    learning_rate,
    l2_sensitivity=settings.l2_clip_norm,
    noise_multiplier=release.noise_multiplier,
    denominator=settings.expected_batch_size,
    key=release.noise_key(),
    **options,
  )
  schedule = (
    learning_rate if callable(learning_rate) else lambda step: learning_rate
  )
  return PrivateOptimizer(
    wrapped, release=release, learning_rate=schedule, options=options
  )


def register_states() -> None:
  """Registers rules by which T5X partitions the states of this project's optimizers.

  T5X needs a rule for each kind of optax state and has none for factored second
  moments. Factored moments are small and are replicated; full ones are partitioned
  as their parameters are.
  """
  _RULES._RULES.setdefault(PrivatizeState, _get_privatize_axes)
  _RULES._RULES.setdefault(optax.FactoredState, _get_factored_axes)


def take_parameters(
  state_dict: Mapping[str, Any],
  target_state_dict: Mapping[str, Any],
  *,
  is_resuming: bool = False,
) -> Mapping[str, Any]:
  """Selects parameters and step of a first checkpoint, without optimizer state.

  Bind it to RestoreCheckpointConfig.state_transformation_fns. Google's checkpoints
  have the state of T5X's Adafactor, which ours cannot use. With
  fallback_to_scratch = True our optimizer's state starts anew.

  Args:
    state_dict: the state of the checkpoint.
    target_state_dict: the state of the model.
    is_resuming: whether it is the training's own checkpoint, which is returned as
      it is.

  Raises:
    ValueError: if the checkpoint has other parameters: T5X would initialize missing
      ones at random.
  """
  if is_resuming:
    return state_dict
  expected = set(traverse_util.flatten_dict(target_state_dict["target"]))
  # A leaf with a folder of its own is a dictionary that names the folder.
  present = {
    next((path[:n] for n in range(len(path)) if path[:n] in expected), path)
    for path in traverse_util.flatten_dict(state_dict["target"])
  }
  if different := sorted("/".join(path) for path in expected ^ present):
    raise ValueError(
      "expected INITIAL_CHECKPOINT_PATH of a model with the same parameters, got"
      f" others: {', '.join(different[:3])}; give the gin file of its model"
    )
  return {
    "target": state_dict["target"],
    "state": {"step": state_dict["state"]["step"]},
  }


def _get_privatize_axes(
  state: PrivatizeState, params_axes: Any
) -> PrivatizeState:
  del params_axes
  return jax.tree.map(lambda leaf: None, state)


def _get_factored_axes(
  state: optax.FactoredState, params_axes: Any
) -> optax.FactoredState:
  moments = jax.tree.map(
    lambda moment, axes: None if moment.shape == (1,) else axes,
    state.v,
    params_axes,
  )
  replicated = jax.tree.map(lambda leaf: None, state)
  return replicated._replace(v=moments)
