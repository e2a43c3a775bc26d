"""Releases one noisy sum over private queries: promise, ledger, then noise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import (
  gaussian,
  ledger,
  sampling,
  terms,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import private_training, results, stage, workspace
from synthq_jax.runtime import release as release_lib
from synthq_jax.storage import artifacts

__all__ = [
  "MIDDLE",
  "centred_sum",
  "draw",
  "enough",
  "everybody",
  "of_split",
  "smallest_delta",
  "words",
]

MIDDLE = 0.5
"""Of values in [0, 1]."""


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


def everybody(units: int) -> sampling.Poisson:
  """Returns the batch of all; with room for two more: nothing is ever cut.

  Args:
    units: how many queries, or users, public.
  """
  return sampling.Poisson(
    num_examples=units, expected_batch_size=units, max_batch_size=units + 2
  )


def of_split(
  config: Any,
  prepared: results.PreparedData,
  split: str,
  base: terms.Terms,
  *,
  size: int,
  space: workspace.Workspace | None = None,
) -> claim_lib.Claim:
  """Returns the promise about one noisy sum over the queries of a split.

  Args:
    config: its `epsilon` and `delta`; None: `smallest_delta`.
    prepared: says how many queries and users there are.
    split: whose queries.
    base: the words, for single queries.
    size: of the sum of scores that is released.
    space: the working directory; None: only the noise is of interest.

  Raises:
    ValueError: if the split has no query.
  """
  units = prepared.units(split)
  most = prepared.queries_per_user or 1
  return claim_lib.calibrated(
    epsilon=config.epsilon,
    delta=config.delta or smallest_delta(prepared, units),
    sampler=everybody(units),
    steps=1,
    l2_clip_norm=most * math.sqrt(size) * MIDDLE,
    words=base if space is None else words(base, space, prepared),
    part=prepared.part(split),
  )


def words(
  base: terms.Terms,
  space: workspace.Workspace,
  prepared: results.PreparedData,
) -> terms.Terms:
  """Returns the terms of a promise for this run and this data.

  Args:
    base: for single queries.
    space: the working directory.
    prepared: the data.
  """
  assumed = () if prepared.division else ("split",)
  if prepared.queries_per_user:
    assumed += ("summed",)
  return base.but(
    unit=prepared.unit,
    assumptions=assumed,
    not_protected=prepared.not_protected,
    secret_is_fixed=space.is_fixed,
  )


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
  space = task.space
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
  noisy = gaussian.noisy(total, promise.noise_std, release.noise_key)
  return statement, noisy


def enough(excess: Callable[[int], float], number: int) -> int:
  """Returns with how many queries a noise is small enough.

  Args:
    excess: from a number of queries to the noise over what is allowed.
    number: how many there are; it is too few.
  """
  while (now := excess(number)) > 1:  # noise grows with log n
    number = math.ceil(number * now)
  return number
