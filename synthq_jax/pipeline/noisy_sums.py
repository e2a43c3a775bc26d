"""Releases one noisy sum over private queries: promise, ledger, then noise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import artifacts
from synthq_jax.pipeline import private_training, results, workspace
from synthq_jax.pipeline import release as release_lib
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import (
  gaussian,
  joint,
  ledger,
  rounding,
  sampling,
  terms,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.stages import stage

__all__ = [
  "MIDDLE",
  "centred_sum",
  "claim",
  "counted",
  "draw",
  "enough",
  "everybody",
  "joined",
  "of_split",
  "smallest_delta",
  "words",
]

MIDDLE = 0.5
"""Of values in [0, 1]."""
_CLOSE = 1.005


def centred_sum(
  table: Float[np.ndarray, "query score"],
) -> Float[np.ndarray, " score"]:
  """Sums the scores of all queries, each less a half.

  Formal guarantee:
    One query more or less moves the sum by at most sqrt(scores) / 2 in L2, and
    there are values that do: a query's row lies in a cube of side 1 around 0.
    Without the half it would be sqrt(scores), since a sum of scores alone also
    tells how many there are.

  >>> centred_sum(np.array([[1.0, 0.5], [0.75, 0.0]]))
  array([ 0.75, -0.5 ])

  Args:
    table: values in [0, 1]; others are moved there, nan to 0, since whether one
      query's is refused would be told without noise.
  """
  return (np.nan_to_num(table).clip(0, 1) - MIDDLE).sum(axis=0)


def counted(
  places: Int[np.ndarray, " query"],
  size: int,
  users: Int[np.ndarray, " query"] | None = None,
) -> Float[np.ndarray, " place"]:
  """Counts queries by the place that each chooses for itself.

  Formal guarantee:
    Without `users` one query more or less moves the vector by 1 in L2, at its own
    place alone. With them each query weighs one over the number of its user's, so
    that one user more or less moves it by 1 in L1, hence by at most 1 in L2, and
    by just that where all of a user's queries are at one place.

  >>> counted(np.array([0, 2, 2]), 3), counted(
  ...   np.array([0, 2, 2]), 3, np.array([0, 0, 1]))
  (array([1., 0., 2.]), array([0.5, 0. , 1.5]))

  Args:
    places: of each query, in [0, size), a function of that query alone.
    size: number of places.
    users: who asked each query, where users are what is protected.
  """
  weights = None if users is None else 1.0 / np.bincount(users)[users]
  return np.bincount(places, weights, minlength=size).astype(float)


def everybody(units: int) -> sampling.Poisson:
  """Returns the batch of all; with room for two more: nothing is ever cut.

  Args:
    units: how many queries, or users, public.
  """
  return sampling.Poisson(
    num_examples=units, expected_batch_size=units, max_batch_size=units + 2
  )


def claim(
  *,
  epsilon: float,
  delta: float | None,
  units: int,
  l2_sensitivity: float,
  words: terms.Terms,
  part: str = "",
  beside: statement_lib.PrivacyStatement | None = None,
) -> claim_lib.Claim:
  """Returns the promise about one noisy sum over all queries.

  Args:
    epsilon: of the promise, or of it and `beside` together.
    delta: of the promise; None: 1 / (2n).
    units: how many queries, or users, public.
    l2_sensitivity: of the sum.
    words: of the promise.
    part: the records that are read, as `releases.Release` has it.
    beside: a claim that `epsilon` covers, too; None: there is none.

  Raises:
    ValueError: if `beside` leaves nothing of epsilon.
  """

  def made(target: float) -> claim_lib.Claim:
    return claim_lib.calibrated(
      epsilon=target,
      delta=delta,
      sampler=everybody(units),
      steps=1,
      l2_clip_norm=l2_sensitivity,
      words=words,
      part=part,
    )

  if beside is None or beside.is_public:
    return made(epsilon)
  if not beside.epsilon < epsilon:
    raise ValueError(
      f"expected an epsilon above the {rounding.epsilon(beside.epsilon)} that is"
      f" spent before, got epsilon={rounding.epsilon(epsilon)}"
    )

  def is_within(target: float) -> bool:
    both = [beside, made(target).statement("noisy_sums")]
    return joined(both).epsilon <= epsilon

  low, high = (epsilon - beside.epsilon) * 0.9, epsilon
  while not is_within(low):  # plain addition, but for the deltas
    low, high = low / 2, low
  while high / low > _CLOSE:
    middle = math.sqrt(low * high)
    low, high = (middle, high) if is_within(middle) else (low, middle)
  return made(low)


def of_split(
  config: Any,
  prepared: results.PreparedData,
  split: str,
  base: terms.Terms,
  *,
  how: str = "",
  size: int | None = None,
  space: workspace.Workspace | None = None,
  beside: statement_lib.PrivacyStatement | None = None,
) -> claim_lib.Claim:
  """Returns the promise about one noisy sum over the queries of a split.

  Args:
    config: its `epsilon` and `delta`; None: `smallest_delta`.
    prepared: says how many queries and users there are.
    split: whose queries.
    base: the words, for single queries.
    how: as in `words`.
    size: of the sum of scores that is released; None: counts, which a unit moves
      by 1.
    space: the working directory; None: only the noise is of interest.
    beside: as in `claim`.

  Raises:
    ValueError: if `beside` leaves nothing of epsilon, or the split has no query.
  """
  units = prepared.units(split)
  most = prepared.queries_per_user or 1
  return claim(
    epsilon=config.epsilon,
    delta=config.delta or smallest_delta(prepared, units),
    units=units,
    l2_sensitivity=1.0 if size is None else most * math.sqrt(size) * MIDDLE,
    words=base if space is None else words(base, how, space, prepared),
    part=prepared.part(split),
    beside=beside,
  )


def words(
  base: terms.Terms,
  how: str,
  space: workspace.Workspace,
  prepared: results.PreparedData,
) -> terms.Terms:
  """Returns the words of a promise for this run and this data.

  Args:
    base: for single queries.
    how: what is done with the queries of one user, where these are protected.
    space: the working directory.
    prepared: the data.
  """
  assumed = () if prepared.division else (terms.SPLIT,)
  if space.is_fixed:
    assumed = (terms.fixed_secret("run"), *assumed)
  if prepared.queries_per_user:
    base = terms.users(prepared.unit, how, base)
  return base.but(assumptions=assumed, not_protected=prepared.not_protected)


def smallest_delta(prepared: results.PreparedData, units: int) -> float:
  """Returns the delta of a release, none above a training's.

  Args:
    prepared: says how many queries, or users, are for training.
    units: of what is released.
  """
  trained = (prepared.num_users or prepared.num_queries)["train"]
  return 1 / (2 * max(units, trained))


def draw(
  task: stage.Task,
  promise: claim_lib.Claim,
  total: Float[np.ndarray, " number"],
) -> tuple[statement_lib.PrivacyStatement, Float[np.ndarray, " number"]]:
  """Enters a promise into the ledger, and only then draws the noise.

  Formal guarantee:
    The noise has the scale of the promise, comes from the secret and from numbers
    that are drawn for this release and these values alone (`release.start`), and
    is not drawn before the ledger holds the promise. Assumed: one unit moves
    `total` by at most `promise.l2_sensitivity`.

  Args:
    task: with the working directory's secret.
    promise: from `claim`.
    total: the sum.

  Returns:
    The statement, and the sum with noise.
  """
  space = task.folders
  directory = private_training.state_directory(space, task.place, task.digest)
  release = release_lib.start(
    space,
    task.place,
    task.digest,
    directory=directory,
    # The same numbers at two scales would tell the sum.
    program=artifacts.fingerprint(
      space.seed(f"sum {total.tolist()}"),
      promise.noise_multiplier,
      promise.l2_sensitivity,
    ),
  )
  statement = promise.enter(space.private(ledger.NAME), release.identifier)
  std = promise.noise_multiplier * promise.l2_sensitivity
  return statement, gaussian.noisy(total, std, release.noise_key)


def joined(
  statements: list[statement_lib.PrivacyStatement], note: str = ""
) -> statement_lib.PrivacyStatement:
  """Returns the claim of what several results went into.

  Args:
    statements: of these results.
    note: how it was made of them; none if empty.

  Raises:
    ValueError: if no claim covers them all.
  """
  whole = statements[0] if len(statements) == 1 else joint.claim(statements)
  if whole is None:
    units = sorted({one.unit for one in statements})
    raise ValueError(f"expected claims that one covers, got units {units}")
  return statement_lib.inherit(whole, note) if note else whole


def enough(excess: Callable[[int], float], number: int) -> int:
  """Returns with how many queries a noise is small enough.

  Args:
    excess: from a number of queries to the noise over what is allowed.
    number: how many there are; it is too few.
  """
  while (now := excess(number)) > 1:  # noise grows with log n
    number = math.ceil(number * now)
  return number
