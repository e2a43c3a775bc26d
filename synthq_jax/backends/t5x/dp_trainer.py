"""Runs T5X's trainer with private steps."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
from jax import lax

from synthq_jax import extras
from synthq_jax.backends.t5x import dp_optimizers, gradients
from synthq_jax.backends.t5x import release as release_lib
from synthq_jax.optim.privatize import PrivatizeState
from synthq_jax.runtime import fingerprints
from synthq_jax.storage import artifacts

with extras.required("t5x"):
  from t5x import metrics as metrics_lib
  from t5x import optimizers, partitioning, utils
  from t5x import train_state as train_state_lib
  from t5x import trainer as trainer_lib

__all__ = ["DPTrainer"]

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_LOOKED_AT = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 1_001_000)
"""Steps at which a resumed training's learning rate must be the same."""

_OF_LOSS = ("_label_smoothing", "_z_loss", "_loss_normalizing_factor")
_OF_OPTIMIZER = ("hyper_params", "options")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class DPTrainer(trainer_lib.Trainer):
  """Clips per example, adds noise, and leaves all other work to T5X.

  T5X's optimizer gets the private mean (clipped sum + noise) / expected batch
  size; its computations are post-processing. A `dp_optimizers.PrivateOptimizer`
  gets the clipped sum and adds the noise. Dropout masks are functions of the
  release's secret, the step and the example.

  Formal guarantee: the release's statement holds for all checkpoints, if
  batches come from `dp_dataset.get_dataset`. T5X's summaries hold learning
  rates and, on request, norms of parameters and private means. The statement
  does NOT cover the times that they hold: on one device, microbatches of padding
  are left out. Nor does it cover what `writes_private_metrics` writes.
  """

  def __init__(
    self,
    model: Any,
    train_state: train_state_lib.TrainState,
    partitioner: partitioning.BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: Any,
    rng: jax.Array,
    learning_rate_fn: Callable[[Any], Any] | None,
    release: release_lib.Release,
    strategy: str = "auto",
    num_microbatches: int | None = None,
    weight_metrics_computer: "trainer_lib.WeightMetricsComputer | None" = None,
    writes_private_metrics: bool = False,
  ):
    """Refuses settings that break the guarantee; enters the training in the ledger.

    Args:
      model: T5X's model.
      train_state: the model's parameters and optimizer state.
      partitioner: T5X's partitioner.
      eval_names: as in T5X's Trainer.
      summary_dir: as in T5X's Trainer.
      train_state_axes: as in T5X's Trainer.
      rng: key from RANDOM_SEED; dropout and noise do not depend on it, but on keys
        of the release.
      learning_rate_fn: as in T5X's Trainer; None for an optax optimizer, which
        has its own.
      release: the release, shared with the dataset.
      strategy: as in `optim.clipped_grad`.
      num_microbatches: number of parts in which a batch is processed; the result
        is the same up to rounding.
      weight_metrics_computer: as in T5X's Trainer, for the private mean; None
        for a `PrivateOptimizer`, whose gradients are not private yet.
      writes_private_metrics: whether to write the mean loss and norm of each
        batch to the summaries, which then must not be published.

    Raises:
      ValueError: if a setting breaks the guarantee or silently changes it.
    """
    optimizer = model.optimizer_def
    self._takes_sum = isinstance(optimizer, dp_optimizers.PrivateOptimizer)
    rows = release.settings.max_batch_size
    if rows % (num_microbatches or 1):
      raise ValueError(
        "expected DPTrainer.num_microbatches to divide BATCH_SIZE ="
        f" {rows}, got {num_microbatches}"
      )
    self._grad_fn = gradients.clipped_grad(
      model,
      l2_clip_norm=release.settings.l2_clip_norm,
      strategy=strategy,
      microbatch_size=rows // (num_microbatches or 1),
    )
    _check_state(train_state, rng)
    _check_optimizer(optimizer, learning_rate_fn, release)
    if self._takes_sum and weight_metrics_computer is not None:
      raise ValueError(
        "expected weight_metrics_computer=None with dp_optimizers, got one: the"
        " gradients that it would write have no noise yet"
      )
    self._release = release
    self._writes_private_metrics = writes_private_metrics
    self._passed_warm_up = False
    step = release_lib.read_step(utils.get_local_data(train_state.step))
    schedule = learning_rate_fn or optimizer.learning_rate
    self._first_step = release.begin(
      step,
      {
        **_collect_facts(model, train_state, schedule),
        "strategy": strategy,
        "microbatches": num_microbatches or 1,
        "machine": fingerprints.machine(partitioner.mesh, strategy),
      },
      start=_digest(train_state.params),
    )
    if self._takes_sum:
      _check_count(train_state, step - self._first_step)
      first, of_training = self._first_step, optimizer.learning_rate
      learning_rate_fn = lambda step: of_training(step - first)  # noqa: E731
    super().__init__(
      model=model,
      train_state=train_state,
      partitioner=partitioner,
      eval_names=eval_names,
      summary_dir=summary_dir,
      train_state_axes=train_state_axes,
      rng=rng,
      learning_rate_fn=learning_rate_fn,
      num_microbatches=num_microbatches,
      weight_metrics_computer=weight_metrics_computer,
    )

  def train(
    self,
    batch_iter: Iterator[Mapping[str, jax.Array]],
    num_steps: int,
    start_step: int | None = None,
  ) -> trainer_lib.ArrayMapFuture:
    """Skips the first batch, which is padding, and runs T5X's loop."""
    if not self._passed_warm_up:
      next(batch_iter)
      self._passed_warm_up = True
    return super().train(batch_iter, num_steps, start_step)

  @trainer_lib.cached_property
  def _partitioned_train_step(self) -> trainer_lib.PartitionedTrainCallable:
    """The private step, partitioned as T5X's own step."""
    data = self._partitioner.data_partition_spec
    return self._partitioner.partition(
      self._private_step,
      in_axis_resources=(self._train_state_axes, data),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),
    )

  def _private_step(
    self, state: train_state_lib.TrainState, batch: Mapping[str, jax.Array]
  ) -> tuple[train_state_lib.TrainState, trainer_lib.MetricMapType]:
    """Returns the next state and metrics."""
    settings = self._release.settings
    features, is_padding = gradients.split(batch)
    gradient, aux = self._grad_fn(
      state.params,
      features,
      key=jax.random.fold_in(self._release.dropout_key(), state.step),
      is_padding_example=is_padding,
    )
    if not self._takes_sum:
      gradient = gradients.private_mean(
        gradient,
        state.step,
        l2_sensitivity=self._grad_fn.sensitivity(_RELATION),
        noise_multiplier=self._release.noise_multiplier,
        denominator=settings.expected_batch_size,
        key=self._release.noise_key(),
      )
    metrics = {"timing/steps_per_second": metrics_lib.StepsPerTime(steps=1)}
    if self._writes_private_metrics:
      metrics |= _make_private_metrics(aux, is_padding)
    return trainer_lib.apply_grads(
      state,
      gradient,
      metrics,
      self._learning_rate_fn(state.step),
      self._weight_metrics_computer,
    )


def _check_state(state: train_state_lib.TrainState, rng: jax.Array) -> None:
  """Refuses state that per-example clipping cannot bound."""
  if state.flax_mutables:
    raise ValueError(
      "expected a model without mutable variables, got"
      f" {', '.join(sorted(state.flax_mutables))}: statistics of a batch reach"
      " from one example into another, and are saved without noise"
    )
  kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)}
  if kinds != {"float32"}:
    raise ValueError(
      "expected parameters in float32, which a sum of small noisy steps needs, got"
      f" {', '.join(sorted(kinds))}: cast them once, between `load` and"
      " `save_t5x` of synthq_jax.models.t5_checkpoints"
    )
  is_threefry = jax.config.jax_default_prng_impl == "threefry2x32"
  if not is_threefry or jnp.shape(rng) not in ((2,), ()):  # raw, or typed
    raise ValueError(
      "expected RANDOM_SEED to be a number and USE_HARDWARE_RNG = False, got"
      " the hardware's generator, whose numbers for one example depend on the"
      " others in the batch (RANDOM_SEED = None asks for it, too)"
    )


def _check_optimizer(
  optimizer: optimizers.OptimizerDef,
  learning_rate_fn: Callable[[Any], Any] | None,
  release: release_lib.Release,
) -> None:
  """Refuses optimizers and learning rates that do not fit the release."""
  # optimizers.MultiOptimizer has several, and would give them one gradient.
  all_of_them = (optimizer, *getattr(optimizer, "sub_optimizers", ()))
  is_optax = any(isinstance(o, optimizers.OptaxWrapper) for o in all_of_them)
  is_private = isinstance(optimizer, dp_optimizers.PrivateOptimizer)
  if is_optax and not is_private:
    raise ValueError(
      "expected T5X's own optimizer or one of dp_optimizers, got another optax"
      " optimizer: its learning rate is unknown here, and its own noise would"
      " be a second one"
    )
  if is_private and optimizer.release is not release:
    raise ValueError(
      "expected one release for trainer and optimizer, got two: bind both to"
      " %RELEASE"
    )
  if is_private and learning_rate_fn is not None:
    raise ValueError(
      "expected DPTrainer.learning_rate_fn = None with an optimizer of"
      " dp_optimizers, got a function, which T5X would ignore: set"
      " dp_optimizers.dp_adafactor.learning_rate"
    )
  if not is_private and learning_rate_fn is None:
    raise ValueError(
      "expected DPTrainer.learning_rate_fn for T5X's own optimizer, got None: set"
      " it to @utils.create_learning_rate_scheduler()"
    )


def _check_count(state: train_state_lib.TrainState, steps: int) -> None:
  """Refuses an optimizer that counted another number of steps: its noise might
  repeat."""

  def is_count(node: Any) -> bool:
    return isinstance(node, PrivatizeState)

  nodes = jax.tree.leaves(state.param_states, is_leaf=is_count)
  counts = [int(utils.get_local_data(n.step)) for n in nodes if is_count(n)]
  if counts != [steps]:
    raise ValueError(
      f"expected an optimizer that counted {steps} steps of this training, got"
      f" {counts}: restore its state together with the parameters"
    )


def _collect_facts(
  model: Any,
  state: train_state_lib.TrainState,
  schedule: Callable[[Any], Any],
) -> dict[str, Any]:
  """Returns the facts that must not change when a training is resumed.

  A repeated step has the same noise, so it must have the same gradient: else the
  difference of both steps would reveal gradients without noise.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(state.params)
  shapes = [
    [jax.tree_util.keystr(path), *x.shape, x.dtype.name] for path, x in leaves
  ]
  optimizer = model.optimizer_def
  computed = [type(model), model.module, type(optimizer)]
  computed += [getattr(model, name, None) for name in _OF_LOSS]
  computed += [getattr(optimizer, name, None) for name in _OF_OPTIMIZER]
  return {
    "learning_rates": [f"{float(schedule(step)):.5g}" for step in _LOOKED_AT],
    "parameters": artifacts.fingerprint(shapes),
    "model": artifacts.fingerprint(
      [_ADDRESS.sub("", str(x)) for x in computed]
    ),
    "versions": fingerprints.versions(),
  }


@jax.jit
def _sums(params: Any) -> Any:
  """Sums each leaf's bits, mixed with their positions: the same on every
  mesh."""

  def sum_leaf(leaf: jax.Array) -> jax.Array:
    words = lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    position = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
      own = lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
      position = position * jnp.uint32(size) + own
    mixed = (words ^ position * jnp.uint32(0x9E3779B1)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)

  return jax.tree.map(sum_leaf, params)


def _digest(params: Any) -> str:
  """Returns a digest of parameters that depends on every bit."""
  sums = jax.tree.leaves(_sums(params))
  return artifacts.fingerprint([int(utils.get_local_data(x)) for x in sums])


def _make_private_metrics(aux: Any, is_padding: jax.Array) -> dict[str, Any]:
  """Returns mean loss and norm of the batch's examples, which are private."""
  count = jnp.maximum(jnp.sum(~is_padding), 1)
  mean = metrics_lib.AveragePerStep.from_model_output
  return {
    "private/loss": mean(jnp.sum(aux.losses) / count),
    "private/gradient_norm": mean(jnp.sum(aux.norms) / count),
  }
