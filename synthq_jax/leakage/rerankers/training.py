"""Trains any reranker on instances, and goes on where it was stopped.

The batch of a step, its keys and its learning rate are functions of the seed,
the recipe and the number of the step. There is no privacy in it: what comes out
is as private as the instances are.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array

from synthq_jax import artifacts, typing
from synthq_jax.data import blocks
from synthq_jax.leakage.rerankers import _batches, interface
from synthq_jax.optim import schedules
from synthq_jax.training import loop

__all__ = ["Recipe", "train"]

_BLOCK = 16
"""Batches among which instances are sorted by their length."""
_RECORD = "fingerprint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How a reranker is trained: Adam, a warmup, a line down to 0."""

  epochs: int = 1
  """How often each instance is seen, where `steps` does not say more."""
  steps: int | None = None
  """Optimizer steps, in place of `epochs`."""
  batch_size: int = 32
  """Rows of a batch: two for each instance, so an even number."""
  learning_rate: float = 1e-3
  """The learning rate at the end of the warmup."""
  warmup: float = 0.1
  """The share of the steps in which the learning rate climbs, in [0, 1)."""
  weight_decay: float = 0.0
  """Decoupled decay of matrices; biases, norms and embeddings have none."""
  max_gradient_norm: float = 1.0
  """Gradients that are longer are scaled down to this norm."""

  def __post_init__(self):
    if self.batch_size < 2 or self.batch_size % 2:
      raise ValueError(
        "expected an even batch_size of at least 2, two rows for each"
        f" instance, got batch_size={self.batch_size}"
      )
    if self.epochs < 1 or (self.steps is not None and self.steps < 1):
      raise ValueError(
        "expected epochs and steps of at least 1, got"
        f" epochs={self.epochs}, steps={self.steps}"
      )
    if not 0 <= self.warmup < 1:
      raise ValueError(f"expected warmup in [0, 1), got warmup={self.warmup}")
    if self.learning_rate <= 0 or self.max_gradient_norm <= 0:
      raise ValueError(
        "expected learning_rate and max_gradient_norm above 0, got"
        f" learning_rate={self.learning_rate},"
        f" max_gradient_norm={self.max_gradient_norm}"
      )

  def num_steps(self, num_instances: int) -> int:
    """Returns the optimizer steps of a training.

    >>> Recipe(epochs=2, batch_size=8).num_steps(10)
    5
    """
    if self.steps is not None:
      return self.steps
    return -(-self.epochs * num_instances // (self.batch_size // 2))


def train(
  reranker: interface.Reranker,
  instances: Sequence[interface.Instance],
  *,
  recipe: Recipe,
  seed: int,
  directory: str | os.PathLike | None = None,
  progress: bool = False,
) -> typing.Params:
  """Trains a reranker; other seeds are other repetitions.

  The relevant and the non-relevant document of a query stand next to each other
  in a batch. Instances are shuffled in every epoch and, within some batches of
  it, sorted by length, so that batches of short texts are narrow.

  Args:
    reranker: what is trained, from the parameters that its `init` returns.
    instances: at least one.
    recipe: how.
    seed: of parameters that start at random, of the order and of dropout.
    directory: where states and metrics are saved; a training that finds some of
      its own there goes on, and comes out the same to the bit. None for none.
    progress: whether a progress bar is shown.

  Returns:
    The parameters after the last step.

  Raises:
    ValueError: if there are no instances, or `directory` holds another training.
  """
  if not instances:
    raise ValueError(
      "expected instances to train on, got none; check the split"
    )
  key = jax.random.key(seed)
  params = reranker.init(jax.random.fold_in(key, 0))
  features = _featurize(reranker, instances)
  steps = recipe.num_steps(len(instances))
  learning_rate = schedules.linear(
    recipe.learning_rate, steps=steps, warmup_steps=int(recipe.warmup * steps)
  )

  def step_fn(state: Any, batch: Mapping[str, Array], step: int):
    return _step(
      state,
      batch,
      learning_rate(step),
      jax.random.fold_in(jax.random.fold_in(key, 1), step),
      reranker=reranker,
      weight_decay=recipe.weight_decay,
      max_norm=recipe.max_gradient_norm,
    )

  transform = _transform(recipe.weight_decay, recipe.max_gradient_norm)
  with _place(directory) as root:
    _claim(root, reranker, recipe, seed, params, features)
    params, _ = loop.train(
      step_fn,
      (params, transform.init(params)),
      _batch_fn(reranker, features, recipe.batch_size // 2, steps, seed),
      steps=steps,
      directory=root / "state",
      metrics_path=root / "metrics.jsonl",
      description=reranker.name,
      examples_per_step=recipe.batch_size,
      settings=loop.Settings(progress=progress),
    )
  return params


def _featurize(
  reranker: interface.Reranker, instances: Sequence[interface.Instance]
) -> interface.Features:
  """Returns rows in pairs: 2i relevant, 2i + 1 not."""
  return reranker.featurize(
    [each.query for each in instances for _ in range(2)],
    [
      document
      for each in instances
      for document in (each.relevant, each.non_relevant)
    ],
  )


def _batch_fn(
  reranker: interface.Reranker,
  features: interface.Features,
  size: int,
  steps: int,
  seed: int,
) -> Callable[[int], interface.Features]:
  """Returns the batch of a step as a function of the step.

  Args:
    reranker: whose features they are.
    features: rows in pairs.
    size: instances in a batch.
    steps: batches in all.
    seed: of the order.
  """
  widths = _batches.widths(features, reranker.padded)
  pairs = widths.reshape(-1, 2).max(axis=1)

  @functools.lru_cache(maxsize=2)  # a block may lie in two epochs
  def order(epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(len(pairs))

  @functools.lru_cache(maxsize=1)
  def block(number: int) -> np.ndarray:
    first = number * _BLOCK
    count = min(_BLOCK, steps - first)  # so that epochs are whole at the end
    places = np.arange(first * size, (first + count) * size)
    drawn = np.array(
      [order(place // len(pairs))[place % len(pairs)] for place in places]
    )
    drawn = drawn[np.argsort(pairs[drawn], kind="stable")]
    generator = np.random.default_rng((seed, number, 1))
    return drawn.reshape(count, size)[generator.permutation(count)]

  def batch(step: int) -> interface.Features:
    drawn = block(step // _BLOCK)[step % _BLOCK]
    rows = np.stack([2 * drawn, 2 * drawn + 1], axis=1).ravel()
    return _batches.cut(features, reranker.padded, rows, pairs[drawn].max())

  return batch


def _transform(
  weight_decay: float, max_norm: float
) -> optax.GradientTransformation:
  """Returns Adam's direction; the learning rate is multiplied afterwards."""
  return optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.scale_by_adam(),
    optax.add_decayed_weights(weight_decay, mask=_is_decayed),
  )


def _is_decayed(params: typing.Params) -> Any:
  """Says for each parameter whether it decays."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      leaf.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)
    ),
    params,
  )


@functools.partial(
  jax.jit, static_argnames=("reranker", "weight_decay", "max_norm")
)
def _step(
  state: tuple[typing.Params, optax.OptState],
  batch: Mapping[str, Array],
  learning_rate: Array,
  key: jax.Array,
  *,
  reranker: interface.Reranker,
  weight_decay: float,
  max_norm: float,
) -> tuple[tuple[typing.Params, optax.OptState], dict[str, Array]]:
  """Takes one step; compiled once for a reranker and a shape of batch."""
  params, moments = state
  loss, gradient = jax.value_and_grad(reranker.loss)(params, batch, key=key)
  transform = _transform(weight_decay, max_norm)
  updates, moments = transform.update(gradient, moments, params)
  updates = jax.tree.map(lambda x: -learning_rate * x, updates)
  return (optax.apply_updates(params, updates), moments), {"loss": loss}


@contextlib.contextmanager
def _place(directory: str | os.PathLike | None) -> Iterator[pathlib.Path]:
  """Yields the folder of a training, or one that is gone afterwards."""
  if directory is not None:
    yield pathlib.Path(directory)
    return
  with tempfile.TemporaryDirectory() as folder:
    yield pathlib.Path(folder)


def _claim(
  root: pathlib.Path,
  reranker: interface.Reranker,
  recipe: Recipe,
  seed: int,
  params: typing.Params,
  features: interface.Features,
) -> None:
  """Makes sure that a folder holds this training and no other.

  Raises:
    ValueError: if it holds another one.
  """
  arrays = [*jax.tree.leaves(params), *features.values()]
  digests = [blocks.digest(np.asarray(array)) for array in arrays]
  # The repr shows a reranker's settings; its tables are in the digests.
  own = artifacts.fingerprint(repr(reranker), recipe, seed, digests)
  path = root / _RECORD
  if path.exists() and path.read_text() != own:
    raise ValueError(
      f"{root}: expected the states of this training, got those of another"
      " (reranker, instances, recipe or seed): delete the folder, or give"
      " another"
    )
  artifacts.write_atomically(path, own)
