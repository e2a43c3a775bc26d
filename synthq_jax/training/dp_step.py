"""Training on Poisson batches with clipped sums and noise."""

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
from synthq_jax.optim import noise as noise_lib
from synthq_jax.privacy import sampling
from synthq_jax.training import distributed, loop, sharded_grad
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

_SEARCHED = 100_000  # records, for two that differ


class State(NamedTuple):
  """What training carries from step to step."""

  params: Any
  opt_state: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """A private optimizer with warm-up and linear decay.

  Attributes:
    name: one of `OPTIMIZERS`.
    learning_rate: the peak, reached after a tenth of the steps; of
      "dp_dual_averaging" that of all steps.
    steps: optimizer steps in all.
    denominator: public constant that the noisy sum is divided by; None: the
      sampler's expected batch size.
    noise_bands: of correlated noise; 1: independent in every step.
  """

  name: str
  learning_rate: float
  steps: int
  denominator: float | None = None
  noise_bands: int = 1

  def build(
    self, *, l2_sensitivity: float, noise_multiplier: float
  ) -> Callable[[jax.Array], optax.GradientTransformation]:
    """Returns a function of the noise's key that makes the optimizer.

    Called inside of a compiled step, with a key that is an argument of it, it
    leaves no secret in the program, and one program serves all keys.

    Args:
      l2_sensitivity: of the clipped sum, as the gradient reports it.
      noise_multiplier: noise standard deviation over the sensitivity.

    Returns:
      From one key to an optax transformation that takes clipped sums.
    """
    schedule = optim.schedules.linear(
      self.learning_rate, steps=self.steps, warmup_steps=self.steps // 10
    )
    make, rate = {
      "dp_adam": (optim.dp_adam, schedule),
      "dp_adafactor": (optim.dp_adafactor, schedule),
      "dp_dual_averaging": (optim.dp_dual_averaging, self.learning_rate),
    }[self.name]
    noise = self._noise()
    return lambda key: make(
      rate,
      l2_sensitivity=l2_sensitivity,
      noise_multiplier=noise_multiplier,
      denominator=self.denominator,
      key=key,
      noise=noise,
    )

  def _noise(self) -> noise_lib.Noise:
    """Returns the noise; correlated noise has the numbers of process 0."""
    if self.noise_bands <= 1:
      return optim.iid()
    banded = functools.partial(
      optim.banded, steps=self.steps, bands=self.noise_bands
    )
    coefficients = distributed.decided(  # processors may differ in the last bit
      "bands", lambda: list(banded().coefficients)
    )
    return noise_lib.Banded(self.steps, tuple(coefficients))


class Drawn(NamedTuple):
  """Records that are costly to make: only those are made that a step draws."""

  number: int
  """Of all records, from which batches are drawn."""
  make: Callable[[np.ndarray], Mapping[str, np.ndarray]]
  """From the numbers of some, rising, to their arrays. What it returns of one does
  not depend on which others are asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """What is trained on which records, and by which devices.

  Attributes:
    grad_fn: from optim.clipped_grad, or another with its call and its
      `sensitivity(relation)`.
    params: where to start.
    records: arrays with one row per record, or how to make them.
    public: arrays that the loss reads and nothing trains. Given, `grad_fn` is a
      function of them that returns the clipped gradient: so they are arguments
      of the compiled step, not constants in it.
    extra_fn: from the number of a step to public fields that join its batch,
      always of the same shapes, drawn without a look at the records.
    mesh: from `mesh.make`: its devices share the rows of a batch, and split
      parameters and optimizer. `params` and `public` are then dicts by path,
      and gradients those of single records, or contrastive ones, which divide
      their work themselves. Every process of it trains with the same arguments.
      None: one device.
    rows_multiple: with a mesh, batches get rows of padding up to a multiple of
      this, from `sharded_grad.rows_multiple`; nothing is accounted with them.
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
    """How many there are, whether a step draws them or not."""
    if isinstance(self.records, Drawn):
      return self.records.number
    return len(next(iter(self.records.values())))

  @property
  def clipped(self) -> Any:
    """The clipped gradient, with what is public."""
    return sharded_grad.bound(self.grad_fn, self.public)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
  """What draws batches, takes steps and adds noise: what is accounted.

  Attributes:
    sampler: draws the batches, and was the basis of the accounting.
    noise_multiplier: calibrated for `sampler` and the optimizer's steps.
    optimizer: what makes steps of the noisy sums.
    batch_seed: secret seed of the sampling.
    noise_key: secret key of the noise.
    dropout_key: given, the loss gets a key for each record and step.

  Raises:
    ValueError: if both keys are one.
  """

  sampler: sampling.Sampler
  noise_multiplier: float
  optimizer: Optimizer
  batch_seed: Sequence[int]
  noise_key: jax.Array
  dropout_key: jax.Array | None = None

  def __post_init__(self):
    """Refuses one key for noise and dropout."""
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
  """Builds one private step, for `jax.jit`.

  Args:
    grad_fn: as in `train`.
    tx: from what `Optimizer.build` returns.
    mesh: as in `train`.

  Returns:
    A function of the state, a batch, its padding (bool [batch]), the dropout
    key of the step or None, and what `train` calls public or None, to the next
    state and private metrics.
  """

  def apply(
    state: State, batch: Any, is_padding: jax.Array, key=None, public=None
  ):
    options = {"is_padding_example": is_padding}
    if key is not None:
      options["key"] = key
    if mesh is None:
      clipped = sharded_grad.bound(grad_fn, public)
      grads, aux = clipped(state.params, batch, **options)
    else:
      clipped = sharded_grad.ShardedGrad(grad_fn=grad_fn, mesh=mesh)
      grads, aux = clipped(state.params, batch, public, **options)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state), _metrics(aux, is_padding)

  return apply


def train(
  training: Training,
  mechanism: Mechanism,
  files: loop.Files,
  settings: loop.Settings,
) -> Any:
  """Trains privately; batch and noise of a step depend on secret and step.

  Args:
    training: what is trained.
    mechanism: what draws batches and adds noise.
    files: where states and metrics go, both private.
    settings: saving and reporting.

  Returns:
    The trained parameters, on the host of every process.

  Raises:
    ValueError: if a record can come back sooner than the noise allows, or the
      loss that is clipped for each record depends on other records too.
  """
  sampler, optimizer = mechanism.sampler, mechanism.optimizer
  if optimizer.noise_bands > 1:
    sampler.check_noise(optimizer.noise_bands)
  training, numbers = _made(training, mechanism)
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
  # Arguments: a program is kept where secrets are not, as in a cache of them.
  own = (mechanism.noise_key, mechanism.dropout_key)
  words, restored = keys.as_argument(own)

  def numbered(state: State, batch, is_padding, public, words, number):
    noise_key, key = restored(words)
    if key is not None:
      key = jax.random.fold_in(key, number)
    one_step = step(training.grad_fn, make_tx(noise_key), training.mesh)
    return one_step(state, batch, is_padding, key, public)

  tx = make_tx(mechanism.noise_key)
  jitted, state, public, place = _placed(training, params, tx, numbered)

  def batch_fn(number: int):
    batch, is_padding = draw(
      training.records,
      sampler,
      mechanism.batch_seed,
      number,
      training.rows_multiple,
      place,
      numbers,
    )
    if training.extra_fn is not None:
      batch |= _placed_whole(training.extra_fn(number), training.mesh)
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


def _made(
  training: Training, mechanism: Mechanism
) -> tuple[Training, np.ndarray | None]:
  """Returns the training with records as arrays, and which ones these are."""
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
  """Refuses fields that are no rows, where rows are divided among devices."""
  if training.mesh is None or training.extra_fn is None:
    return
  if not sharded_grad.divides_itself(training.clipped):
    raise ValueError(
      "expected extra_fn=None with a mesh and a gradient of single records, got"
      " both: its rows are divided among devices, and these fields are no rows;"
      " leave mesh out"
    )


def _placed_whole(fields: Mapping[str, np.ndarray], mesh: Any) -> Any:
  """Puts public fields, the same in every process, on every device."""
  if mesh is None:
    return fields
  where = dict.fromkeys(fields, mesh_lib.whole(mesh))
  return mesh_lib.place(dict(fields), where)


def _check_independence(training: Training, clipped: Any, params: Any) -> None:
  """Refuses a loss of single records in which others have a part."""

  def losses(both: Any, batch: Any):
    return sharded_grad.bound(training.grad_fn, both[1]).loss_fn(both[0], batch)

  if getattr(clipped, "is_per_example", False):
    both = (params, training.public)
    optim.check_independence(losses, both, _two_of(training.records))


def _placed(training: Training, params, tx, numbered):
  """Returns the compiled step, the first state, what is public, the rows' place."""
  mesh, public = training.mesh, training.public
  if mesh is None:
    state = State(params, tx.init(params))
    return jax.jit(numbered), state, jax.device_put(public), None
  held, where = mesh_lib.place_state(params, tx.init, mesh)
  if public is not None:
    public = mesh_lib.place(public, mesh_lib.shardings(public, public, mesh))
  is_whole = sharded_grad.divides_itself(training.clipped)
  where_rows = (mesh_lib.whole if is_whole else mesh_lib.batch_sharding)(mesh)
  place = functools.partial(mesh_lib.place_rows, sharding=where_rows)
  # A CPU's saved states may still be read from the very memory.
  is_cpu = mesh.devices.flat[0].platform == "cpu"
  jitted = jax.jit(
    numbered,
    out_shardings=(State(*where), mesh_lib.whole(mesh)),
    donate_argnums=() if is_cpu else 0,
  )
  return jitted, State(*held), public, place


def draw(
  records: Mapping[str, np.ndarray],
  sampler: sampling.Sampler,
  batch_seed: Sequence[int],
  step: int,
  rows_multiple: int = 1,
  place: Callable[[np.ndarray, np.ndarray], Any] | None = None,
  numbers: np.ndarray | None = None,
) -> tuple[dict[str, Any], Any]:
  """Returns the batch of a step, and which of its rows are padding.

  Args:
    records: arrays with one row per record.
    sampler: draws the batches.
    batch_seed: secret seed of the sampling.
    step: its number.
    rows_multiple: more rows of padding make the batch a multiple of this.
    place: from values and the numbers of rows to these rows, e.g. on a mesh,
      where a process reads its own part; None: NumPy's own indexing.
    numbers: of the records that `records` holds, rising; None: all.

  Returns:
    Arrays [batch, ...], where padding holds the first record, and bool [batch].
  """
  drawn = sampler.batch(batch_seed, step)
  rows, is_padding = drawn.to_arrays(padding_index=0)
  if numbers is not None:
    rows = np.searchsorted(numbers, rows)
  more = -len(rows) % rows_multiple
  rows = np.pad(rows, (0, more))
  is_padding = np.pad(is_padding, (0, more), constant_values=True)
  if place is None:
    return {name: values[rows] for name, values in records.items()}, is_padding
  batch = {name: place(values, rows) for name, values in records.items()}
  return batch, place(is_padding, np.arange(len(rows)))


def _two_of(records: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the first record and the next one that differs from it.

  Where none does, a blank one: whether a run ends must not tell that all are equal.
  """
  searched = {k: values[:_SEARCHED] for k, values in records.items()}
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


def _metrics(aux, is_padding) -> dict[str, jax.Array]:
  """Loss and norm, means where there is one per record: private values."""
  if hasattr(aux, "loss"):  # one gradient for the whole batch
    return {"loss": aux.loss, "norm": aux.norm}
  real = jnp.maximum(jnp.sum(~is_padding), 1)
  return {
    "loss": jnp.sum(aux.losses) / real,
    "norm": jnp.sum(aux.norms) / real,
  }
