"""Trains any reranker on triples, and reranks candidates.

An interrupted training resumes from its newest checkpoint. The batch of a step,
its keys and its learning rate are functions of the seed, the recipe and the
number of the step. The training adds no noise: its parameters are as private as
the triples.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from synthq_jax import checks, typing
from synthq_jax.leakage.rerankers import reranker as reranker_lib
from synthq_jax.models import length_batches
from synthq_jax.optim import schedules
from synthq_jax.retrieval import trec
from synthq_jax.training import loop

__all__ = ["Recipe", "rerank", "train"]

_BLOCK = 16
"""Batches of a block, within which triples are sorted by length."""
_ROWS = 16  # scored at a time
_ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
"""Adam without a learning rate, which `_step` multiplies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """Training settings: Adam, with a warmup and a linear decay to 0.

  A gradient longer than 1 is scaled down to it.
  """

  epochs: int = 1
  """Passes over the triples, unless `steps` is given."""
  steps: int | None = None
  """Optimizer steps, in place of `epochs`."""
  batch_size: int = 32
  """Rows of a batch: two for each triple, so an even number."""
  learning_rate: float = 1e-3
  """Learning rate at the end of the warmup."""
  warmup: float = 0.1
  """Share of the steps in the warmup, in [0, 1)."""

  def __post_init__(self):
    if self.batch_size < 2 or self.batch_size % 2:
      raise ValueError(
        "expected an even batch_size of at least 2, two rows for each"
        f" triple, got batch_size={self.batch_size}"
      )
    checks.at_least(
      1, epochs=self.epochs, steps=1 if self.steps is None else self.steps
    )
    checks.within("[0, 1)", warmup=self.warmup)
    checks.within("(0, inf)", learning_rate=self.learning_rate)

  def num_steps(self, num_triples: int) -> int:
    """Returns the number of optimizer steps of a training.

    >>> Recipe(epochs=2, batch_size=8).num_steps(10)
    5
    """
    if self.steps is not None:
      return self.steps
    return -(-self.epochs * num_triples // (self.batch_size // 2))


def train(
  reranker: reranker_lib.Reranker,
  triples: Sequence[tuple[str, str, str]],
  *,
  recipe: Recipe,
  seed: int,
  directory: pathlib.Path,
) -> typing.Params:
  """Trains a reranker; each seed gives another repetition.

  The relevant and the non-relevant document of a query are neighbours in a
  batch. Triples are shuffled in every epoch. Blocks of batches sort their triples
  by length, so that batches of short texts are narrow.

  Args:
    reranker: reranker to train, from the parameters that its `init` returns.
    triples: texts of a query, a relevant document and one that is not
      relevant; at least one triple.
    recipe: training settings.
    seed: seed of random initial parameters, of the order and of dropout.
    directory: folder of checkpoints and metrics, for this training alone; name
      it, for example, by a fingerprint of all these arguments. A training that
      finds a checkpoint there resumes, with the same result to the bit.

  Returns:
    The parameters after the last step.

  Raises:
    ValueError: if there are no triples.
  """
  if not triples:
    raise ValueError("expected triples to train on, got none; check the split")
  key = jax.random.key(seed)
  params = reranker.init(jax.random.fold_in(key, 0))
  features = reranker.featurize(  # rows in pairs: 2i relevant, 2i + 1 not
    [query for query, *_ in triples for _ in range(2)],
    [document for _, *pair in triples for document in pair],
  )
  steps = recipe.num_steps(len(triples))
  learning_rate = schedules.linear(
    recipe.learning_rate, steps=steps, warmup_steps=int(recipe.warmup * steps)
  )

  def step_fn(state: Any, batch: Mapping[str, Array], step: Any):
    return _step(
      state,
      batch,
      learning_rate(step),
      jax.random.fold_in(jax.random.fold_in(key, 1), step),
      reranker=reranker,
    )

  batch_fn = _make_batch_fn(
    reranker, features, recipe.batch_size // 2, steps, seed
  )
  params, _ = loop.train(
    step_fn,
    (params, _ADAM.init(params)),
    batch_fn,
    loop.Files.below(directory, reranker.name),
    steps=steps,
    examples_per_step=recipe.batch_size,
    settings=loop.Settings(),
  )
  return params


def _make_batch_fn(
  reranker: reranker_lib.Reranker,
  features: reranker_lib.Features,
  size: int,
  steps: int,
  seed: int,
) -> Callable[[int], reranker_lib.Features]:
  """Returns a function that makes a step's batch of `size` triples."""
  widths = _compute_widths(features, reranker.padded)
  pairs = widths.reshape(-1, 2).max(axis=1)

  @functools.lru_cache(maxsize=2)  # a block may span two epochs
  def order(epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(len(pairs))

  @functools.lru_cache(maxsize=1)
  def block(number: int) -> np.ndarray:
    first = number * _BLOCK
    # The last block draws no triple beyond the last step: epochs stay complete.
    count = min(_BLOCK, steps - first)
    positions = np.arange(first * size, (first + count) * size)
    drawn = np.array(
      [
        order(position // len(pairs))[position % len(pairs)]
        for position in positions
      ]
    )
    drawn = drawn[np.argsort(pairs[drawn], kind="stable")]
    generator = np.random.default_rng((seed, number, 1))
    return drawn.reshape(count, size)[generator.permutation(count)]

  def batch(step: int) -> reranker_lib.Features:
    drawn = block(step // _BLOCK)[step % _BLOCK]
    rows = np.stack([2 * drawn, 2 * drawn + 1], axis=1).ravel()
    return _cut_rows(features, reranker.padded, rows, pairs[drawn].max())

  return batch


@functools.partial(jax.jit, static_argnames="reranker")
def _step(
  state: tuple[typing.Params, optax.OptState],
  batch: Mapping[str, Array],
  learning_rate: Array,
  key: jax.Array,
  *,
  reranker: reranker_lib.Reranker,
) -> tuple[tuple[typing.Params, optax.OptState], dict[str, Array]]:
  """Takes one step; compiles once for a reranker and a shape of batch."""
  params, moments = state
  loss, gradient = jax.value_and_grad(reranker.loss)(
    params, batch, {"dropout": key}
  )
  updates, moments = _ADAM.update(gradient, moments, params)
  updates = jax.tree.map(lambda x: -learning_rate * x, updates)
  return (optax.apply_updates(params, updates), moments), {"loss": loss}


def rerank(
  reranker: reranker_lib.Reranker,
  params: typing.Params,
  candidates: trec.Run,
  queries: Mapping[str, str],
  documents: Mapping[str, str],
) -> trec.Run:
  """Scores the candidates of each query.

  Rows are batched by their own length, in batches of one size. So the score of a
  document depends only on its query and its text.

  Args:
    reranker: reranker with these parameters.
    params: parameters from `train`, or from the reranker's `init`.
    candidates: query id -> document id -> score, which only has to be
      finite.
    queries: query id -> text.
    documents: document id -> text, for all candidates.

  Returns:
    The run: each query's documents by descending score, equal scores by
    ascending document id, an order that `trec.ranking` keeps.

  Raises:
    ValueError: if a score is not finite.
  """
  ranked = {query: trec.ranking(run) for query, run in candidates.items()}
  pairs = [(query, document) for query in ranked for document in ranked[query]]
  scores = _score(
    reranker,
    params,
    reranker.featurize(
      [queries[query] for query, _ in pairs],
      [documents[document] for _, document in pairs],
    ),
  )
  if not np.isfinite(scores).all():
    index = int(np.argmin(np.isfinite(scores)))
    raise ValueError(
      f"{reranker.name}: expected finite scores, got {scores[index]} for query"
      f" {pairs[index][0]!r} and document {pairs[index][1]!r}: its training diverged,"
      " take a smaller learning rate"
    )
  scored = dict(zip(pairs, scores.tolist(), strict=True))
  result = {}
  for query, ids in ranked.items():
    run = {each: scored[query, each] for each in sorted(ids)}
    result[query] = {each: run[each] for each in trec.ranking(run)}
  return result


def _score(
  reranker: reranker_lib.Reranker,
  params: typing.Params,
  features: reranker_lib.Features,
) -> Float[np.ndarray, " row"]:
  """Scores rows in batches of one size and few widths, the widest first."""
  widths = _compute_widths(features, reranker.padded)
  scores = np.zeros(len(widths), np.float32)
  for width in sorted(set(widths.tolist()), reverse=True):
    members = np.flatnonzero(widths == width)
    for start in range(0, len(members), _ROWS):
      rows = members[start : start + _ROWS]
      batch = _cut_rows(features, reranker.padded, rows, width, size=_ROWS)
      scored = _score_batch(params, batch, reranker=reranker)
      scores[rows] = np.asarray(scored)[: len(rows)]
  return scores


@functools.partial(jax.jit, static_argnames="reranker")
def _score_batch(
  params: typing.Params,
  batch: Mapping[str, Array],
  *,
  reranker: reranker_lib.Reranker,
) -> Float[Array, " batch"]:
  return reranker.score(params, batch)


def _compute_widths(
  features: reranker_lib.Features, padded: Sequence[str]
) -> Int[np.ndarray, " row"]:
  """Returns the number of columns that each row needs, one of a few widths.

  >>> tokens = np.array([[5, 6, 0] + [0] * 37, [5] * 40])
  >>> _compute_widths({"tokens": tokens}, ("tokens",))
  array([16, 40])
  """
  needed = np.zeros(len(next(iter(features.values()))), int)
  for name in padded:
    columns = features[name].shape[1]
    lengths = length_batches.lengths(features[name])
    rounded = [length_batches.bucket(n) for n in range(columns + 1)]
    needed = np.maximum(needed, np.minimum(rounded, columns)[lengths])
  return needed


def _cut_rows(
  features: reranker_lib.Features,
  padded: Sequence[str],
  rows: Int[np.ndarray, " row"],
  width: int,
  *,
  size: int | None = None,
) -> reranker_lib.Features:
  """Selects rows, drops columns of padding and fills up with rows of zeros."""
  missing = 0 if size is None else size - len(rows)

  def take(name: str, array: np.ndarray) -> np.ndarray:
    taken = array[rows, :width] if name in padded else array[rows]
    margins = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    return np.pad(taken, margins)

  return {name: take(name, array) for name, array in features.items()}
