"""Releases one noisy sum over private queries: claim, ledger entry, then
noise."""

import math
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
from synthq_jax.runtime import private_training, results, stage
from synthq_jax.runtime import release as release_lib
from synthq_jax.storage import artifacts

__all__ = [
  "MIDDLE",
  "compute_centred_sum",
  "draw",
  "full_batch",
  "get_smallest_delta",
  "make_claim",
]

MIDDLE = 0.5
"""Middle of the range [0, 1] of values."""


def compute_centred_sum(
  table: Float[np.ndarray, "query score"],
) -> Float[np.ndarray, " score"]:
  """Sums the scores of all queries, each less a half.

  Formal guarantee:
    One query more or less moves the sum by at most sqrt(scores) / 2 in L2, and
    some values attain this bound: a query's row lies in a cube of side 1 around
    0. Without the half the bound would be sqrt(scores), since a sum of plain
    scores also tells the number of queries.

  >>> compute_centred_sum(np.array([[1.0, 0.5], [0.75, 0.0]]))
  array([ 0.75, -0.5 ])

  Args:
    table: values in [0, 1]. Others are clipped to this range and nan becomes 0:
      an error about one query's value would reveal it without noise.
  """
  return (np.nan_to_num(table).clip(0, 1) - MIDDLE).sum(axis=0)


def full_batch(units: int) -> sampling.Poisson:
  """Returns a sampler that draws every unit, with room for two more.

  Args:
    units: number of queries or users, which is public.
  """
  return sampling.Poisson(
    num_examples=units, expected_batch_size=units, max_batch_size=units + 2
  )


def make_claim(
  config: Any,
  prepared: results.PreparedData,
  *,
  size: int,
  secret_is_fixed: bool = False,
) -> claim_lib.Claim:
  """Returns the claim of one noisy sum over the test queries.

  Args:
    config: settings with `epsilon` and `delta`; delta None: `get_smallest_delta`.
    prepared: the data, with its numbers of queries and users.
    size: number of entries of the released sum.
    secret_is_fixed: whether settings fix the secret of the working directory.

  Raises:
    ValueError: if there is no test query.
  """
  units = prepared.units(prepared.test_split)
  most = prepared.queries_per_user or 1
  return claim_lib.calibrated(
    epsilon=config.epsilon,
    delta=config.delta or get_smallest_delta(prepared, units),
    sampler=full_batch(units),
    steps=1,
    l2_clip_norm=most * math.sqrt(size) * MIDDLE,
    words=terms.SCORES.but(
      unit=prepared.unit,
      assumptions=(
        *(() if prepared.division else ("split",)),
        *(("summed",) if prepared.queries_per_user else ()),
      ),
      not_protected=prepared.not_protected,
      secret_is_fixed=secret_is_fixed,
    ),
    part=prepared.part(prepared.test_split),
  )


def get_smallest_delta(prepared: results.PreparedData, units: int) -> float:
  """Returns the delta of a release: at most that of a training.

  Args:
    prepared: the data, with its numbers of train queries and users.
    units: number of units in the released sum.
  """
  trained = (prepared.num_users or prepared.num_queries)["train"]
  return 1 / (2 * max(units, trained))


def draw(
  task: stage.Task,
  promise: claim_lib.Claim,
  total: Float[np.ndarray, " number"],
) -> tuple[statement_lib.PrivacyStatement, Float[np.ndarray, " number"]]:
  """Enters a claim into the ledger, then draws the noise and adds it.

  Formal guarantee:
    The noise has the scale of the claim. It comes from the secret and from
    numbers that are drawn for this release and these values alone
    (`release.start`). It is drawn only after the ledger holds the claim.
    Assumed: one unit moves `total` by at most `promise.l2_sensitivity`.

  Args:
    task: task with the working directory's secret.
    promise: the claim, from `make_claim`.
    total: the exact sum.

  Returns:
    The statement, and the sum with noise.
  """
  space = task.space
  directory = private_training.state_directory(
    space, task.result_path, task.digest
  )
  release = release_lib.start(
    space,
    task.result_path,
    task.digest,
    directory=directory,
    # The same noise at two scales would reveal the sum.
    program=artifacts.fingerprint(
      space.seed(f"sum {total.tolist()}"),
      promise.noise_multiplier,
      promise.l2_sensitivity,
    ),
  )
  statement = promise.enter(space.private(ledger.NAME), release.identifier)
  noisy = gaussian.noisy(total, promise.noise_std, release.noise_key)
  return statement, noisy
