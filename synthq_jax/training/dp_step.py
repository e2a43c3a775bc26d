"""Trains privately, with sampled batches, clipped sums and noise."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.optim import keys
from synthq_jax.privacy import sampling
from synthq_jax.training import loop, sharded_grad
from synthq_jax.training import mesh as mesh_lib

__all__ = [
  "OPTIMIZERS",
  "Drawn",
  "Mechanism",
  "Optimizer",
  "State",
  "Training",
  "draw",
  "step",
  "train",
]

OPTIMIZERS = ("dp_adam", "dp_adafactor", "dp_dual_averaging")

_MAX_SEARCHED = 100_000  # records searched for two that differ


class State(NamedTuple):
  """Parameters and optimizer state between two steps."""

  params: Any
  opt_state: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """A private optimizer with warm-up and linear decay.

  Attributes:
    name: one of `OPTIMIZERS`.
    learning_rate: the peak, reached after a tenth of the steps; for
      "dp_dual_averaging" the rate of all steps.
    steps: the total number of optimizer steps.
    denominator: public constant that the noisy sum is divided by; None: `train`
      takes the sampler's expected batch size, and `build` fails.
  """

  name: str
  learning_rate: float
  steps: int
  denominator: float | None = None

  def build(
    self, *, l2_sensitivity: float, noise_multiplier: float
  ) -> Callable[[jax.Array], optax.GradientTransformation]:
    """Returns a function that makes the optimizer from the noise's key.

    Call it inside a compiled step, with a key that is an argument of the step.
    Then the program holds no secret, and one program serves all keys.

    Args:
      l2_sensitivity: the sensitivity of the clipped sum, as the gradient reports
        it.
      noise_multiplier: noise standard deviation over the sensitivity.

    Returns:
      A function from a key to an optax transformation that takes clipped sums.
    """
    schedule = optim.schedules.linear(
      self.learning_rate, steps=self.steps, warmup_steps=self.steps // 10
    )
    make, rate = {
      "dp_adam": (optim.dp_adam, schedule),
      "dp_adafactor": (optim.dp_adafactor, schedule),
      "dp_dual_averaging": (optim.dp_dual_averaging, self.learning_rate),
    }[self.name]
    return lambda key: make(
      rate,
      l2_sensitivity=l2_sensitivity,
      noise_multiplier=noise_multiplier,
      denominator=self.denominator,
      key=key,
    )


class Drawn(NamedTuple):
  """Lazily computed records: training computes only records that a step draws."""

  number: int
  """The number of all records, from which batches are drawn."""
  make: Callable[[np.ndarray], Mapping[str, np.ndarray]]
  """Computes the arrays of some records from their numbers, in rising order. The
  result for one record does not depend on the other numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """The model, gradient, records and devices of one training.

  Attributes:
    grad_fn: a clipped gradient of `optim.clipped_grad`, or another function with
      the same call and `sensitivity(relation)`.
    params: the initial parameters.
    records: arrays with one row per record, or `Drawn` records.
    public: arrays that the loss reads and no step trains. If set, `grad_fn` is a
      function of them that returns the clipped gradient. So they are arguments of
      the compiled step, not constants in it.
    extra_fn: returns public fields that join the batch of a step, from the number
      of the step. Their shapes are constant, and they do not depend on the
      records.
    mesh: a mesh of `mesh.make`, whose devices share the rows of a batch and split
      parameters and optimizer. `params` and `public` are then dicts by path. The
      gradient is one of single records, or a contrastive one, which divides its
      work itself. Every process of the mesh trains with the same arguments. None:
      one device.
    rows_multiple: with a mesh, batches are padded to a multiple of this number of
      rows, from `sharded_grad.rows_multiple`. It does not change the accounting.
  """

  grad_fn: Callable[..., Any]
  params: Any
  records: Mapping[str, np.ndarray] | Drawn
  public: Any = None
  extra_fn: Callable[[int], Mapping[str, np.ndarray]] | None = None
  mesh: jax.sharding.Mesh | None = None
  rows_multiple: int = 1

  @property
  def num_records(self) -> int:
    """The number of all records, including those that no step draws."""
    if isinstance(self.records, Drawn):
      return self.records.number
    return len(next(iter(self.records.values())))

  @property
  def clipped(self) -> Any:
    """The clipped gradient, with the public arrays bound."""
    return sharded_grad.bind_public(self.grad_fn, self.public)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
  """The private mechanism that is accounted: sampler, noise and optimizer.

  Attributes:
    sampler: draws the batches; the accounting uses the same sampler.
    noise_multiplier: calibrated for `sampler` and the optimizer's steps.
    optimizer: updates the parameters with the noisy sums.
    batch_seed: secret seed of the sampling.
    noise_key: secret key of the noise.
    dropout_key: if set, the loss gets a key for each record and step.

  Raises:
    ValueError: if `noise_key` and `dropout_key` are equal.
  """

  sampler: sampling.Sampler
  noise_multiplier: float
  optimizer: Optimizer
  batch_seed: Sequence[int]
  noise_key: jax.Array
  dropout_key: jax.Array | None = None

  def __post_init__(self):
    """Refuses equal keys for noise and dropout."""
    own = (self.noise_key, self.dropout_key)
    if any(key is None or isinstance(key, jax.core.Tracer) for key in own):
      return
    words, _ = keys.as_argument(own)
    if np.array_equal(*words):
      raise ValueError(
        "expected a noise_key of its own, got the dropout_key again: whoever"
        " learns a mask of dropout learns of the noise; take both from"
        " jax.random.split, or from optim.secret_key with two purposes"
      )


def step(
  grad_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
  """Builds the function of one private step, for `jax.jit`.

  Args:
    grad_fn: as in `Training`.
    tx: an optimizer made by the function that `Optimizer.build` returns.
    mesh: as in `Training`.

  Returns:
    A function that returns the next state and private metrics. Its arguments are
    the state, a batch, the padding mask (bool [batch]), the dropout key of the
    step or None, and the public arrays or None.
  """

  def apply(
    state: State, batch: Any, is_padding: jax.Array, key=None, public=None
  ):
    options = {"is_padding_example": is_padding}
    if key is not None:
      options["key"] = key
    if mesh is None:
      clipped = sharded_grad.bind_public(grad_fn, public)
      grads, aux = clipped(state.params, batch, **options)
    else:
      clipped = sharded_grad.ShardedGrad(grad_fn=grad_fn, mesh=mesh)
      grads, aux = clipped(state.params, batch, public, **options)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state), _compute_metrics(aux, is_padding)

  return apply


def train(
  training: Training,
  mechanism: Mechanism,
  files: loop.Files,
  settings: loop.Settings,
) -> Any:
  """Trains privately; batch and noise depend on the secret and the step alone.

  Args:
    training: the model, gradient, records and devices.
    mechanism: sampler, noise and optimizer.
    files: the files for states and metrics, both private.
    settings: settings for saving and reporting.

  Returns:
    The trained parameters, on the host of every process.

  Raises:
    ValueError: if each record is clipped by itself, but its loss depends on other
      records.
  """
  sampler, optimizer = mechanism.sampler, mechanism.optimizer
  training, numbers = _compute_records(training, mechanism)
  _check_extra(training)
  params = jax.tree.map(jnp.asarray, training.params)
  clipped = training.clipped
  _check_independence(training, clipped, params)
  if optimizer.denominator is None:
    optimizer = dataclasses.replace(
      optimizer, denominator=sampler.expected_batch_size
    )
  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  make_tx = optimizer.build(
    l2_sensitivity=clipped.sensitivity(relation),
    noise_multiplier=mechanism.noise_multiplier,
  )
  # Keys are arguments, since a cache of programs must not hold secrets.
  own = (mechanism.noise_key, mechanism.dropout_key)
  words, restored = keys.as_argument(own)

  def numbered(state: State, batch, is_padding, public, words, number):
    noise_key, key = restored(words)
    if key is not None:
      key = jax.random.fold_in(key, number)
    one_step = step(training.grad_fn, make_tx(noise_key), training.mesh)
    return one_step(state, batch, is_padding, key, public)

  tx = make_tx(mechanism.noise_key)
  jitted, state, public, place_rows = _compile(training, params, tx, numbered)

  def batch_fn(number: int):
    batch, is_padding = draw(
      training.records,
      sampler,
      mechanism.batch_seed,
      number,
      training.rows_multiple,
      place_rows,
      numbers,
    )
    if training.extra_fn is not None:
      batch |= _replicate(training.extra_fn(number), training.mesh)
    return batch, is_padding

  state = loop.train(
    lambda state, batch, number: jitted(
      state, *batch, public, words, np.int32(number)
    ),
    state,
    batch_fn,
    files,
    steps=optimizer.steps,
    examples_per_step=sampler.expected_batch_size,
    settings=settings,
  )
  return mesh_lib.gather(state.params)


def _compute_records(
  training: Training, mechanism: Mechanism
) -> tuple[Training, np.ndarray | None]:
  """Computes the drawn records; returns the training and the record numbers.

  The numbers are None if the records are arrays already.
  """
  if not isinstance(training.records, Drawn):
    return training, None
  is_drawn = np.zeros(training.num_records, bool)
  is_drawn[0] = True  # padding holds the first record
  for step in range(mechanism.optimizer.steps):
    drawn = mechanism.sampler.batch(mechanism.batch_seed, step)
    is_drawn[drawn.indices[~drawn.is_padding]] = True
  numbers = np.flatnonzero(is_drawn)
  records = training.records.make(numbers)
  return dataclasses.replace(training, records=records), numbers


def _check_extra(training: Training) -> None:
  """Refuses public fields of a batch whose rows are divided among devices."""
  if training.mesh is None or training.extra_fn is None:
    return
  if not sharded_grad.divides_itself(training.clipped):
    raise ValueError(
      "expected extra_fn=None with a mesh and a gradient of single records, got"
      " both: its rows are divided among devices, and these fields are no rows;"
      " leave mesh out"
    )


def _replicate(fields: Mapping[str, np.ndarray], mesh: Any) -> Any:
  """Copies public fields, the same in every process, to every device."""
  if mesh is None:
    return fields
  where = dict.fromkeys(fields, mesh_lib.whole(mesh))
  return mesh_lib.place(dict(fields), where)


def _check_independence(training: Training, clipped: Any, params: Any) -> None:
  """Refuses a loss of single records that depends on other records."""

  def losses(both: Any, batch: Any):
    clipped = sharded_grad.bind_public(training.grad_fn, both[1])
    return clipped.loss_fn(both[0], batch)

  if getattr(clipped, "is_per_example", False):
    both = (params, training.public)
    pair = _find_different_records(training.records)
    optim.check_independence(losses, both, pair)


def _compile(training: Training, params, tx, numbered):
  """Jits the step and places the state and the public arrays on the devices.

  Returns:
    The jitted step, the first state, the public arrays, and a function that
    places rows on the mesh (None without a mesh).
  """
  mesh, public = training.mesh, training.public
  if mesh is None:
    state = State(params, tx.init(params))
    return jax.jit(numbered), state, jax.device_put(public), None
  state, where = mesh_lib.place_state(params, tx.init, mesh)
  if public is not None:
    public = mesh_lib.place(public, mesh_lib.shardings(public, public, mesh))
  is_whole = sharded_grad.divides_itself(training.clipped)
  where_rows = (mesh_lib.whole if is_whole else mesh_lib.batch_sharding)(mesh)
  place_rows = functools.partial(mesh_lib.place_rows, sharding=where_rows)
  # On CPUs, a state that is still being saved may share the donated memory.
  is_cpu = mesh.devices.flat[0].platform == "cpu"
  jitted = jax.jit(
    numbered,
    out_shardings=(State(*where), mesh_lib.whole(mesh)),
    donate_argnums=() if is_cpu else 0,
  )
  return jitted, State(*state), public, place_rows


def draw(
  records: Mapping[str, np.ndarray],
  sampler: sampling.Sampler,
  batch_seed: Sequence[int],
  step: int,
  rows_multiple: int = 1,
  place_rows: Callable[[np.ndarray, np.ndarray], Any] | None = None,
  numbers: np.ndarray | None = None,
) -> tuple[dict[str, Any], Any]:
  """Draws the batch of a step and its padding mask.

  Args:
    records: arrays with one row per record.
    sampler: draws the batches.
    batch_seed: secret seed of the sampling.
    step: the number of the step.
    rows_multiple: the batch is padded to a multiple of this number of rows.
    place_rows: reads rows from (values, row numbers), e.g. onto a mesh, where each
      process reads its own part; None: NumPy indexing.
    numbers: the numbers of the records in `records`, rising; None: all records.

  Returns:
    Arrays [batch, ...], whose padding holds the first record, and the mask,
    bool [batch].
  """
  drawn = sampler.batch(batch_seed, step)
  rows, is_padding = drawn.to_arrays(padding_index=0)
  if numbers is not None:
    rows = np.searchsorted(numbers, rows)
  more = -len(rows) % rows_multiple
  rows = np.pad(rows, (0, more))
  is_padding = np.pad(is_padding, (0, more), constant_values=True)
  if place_rows is None:
    return {name: values[rows] for name, values in records.items()}, is_padding
  batch = {name: place_rows(values, rows) for name, values in records.items()}
  return batch, place_rows(is_padding, np.arange(len(rows)))


def _find_different_records(
  records: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Returns the first record and the next record that differs from it.

  If all records are equal, the second is blank, or ones if the first is blank. A
  run must not fail in this case, since that would reveal that they are equal.
  """
  searched = {k: values[:_MAX_SEARCHED] for k, values in records.items()}
  differs = [
    (values != values[:1]).reshape(len(values), -1).any(axis=1)
    for values in searched.values()
  ]
  other = int(np.argmax(np.any(differs, axis=0)))
  both = {name: values[[0, other]] for name, values in records.items()}
  if not other:
    is_blank = not any(values.any() for values in both.values())
    for values in both.values():
      values[1] = is_blank
  return both


def _compute_metrics(aux, is_padding) -> dict[str, jax.Array]:
  """Computes loss and norm, private values; means if there is one per record."""
  if hasattr(aux, "loss"):  # one gradient for the whole batch
    return {"loss": aux.loss, "norm": aux.norm}
  real = jnp.maximum(jnp.sum(~is_padding), 1)
  return {
    "loss": jnp.sum(aux.losses) / real,
    "norm": jnp.sum(aux.norms) / real,
  }
