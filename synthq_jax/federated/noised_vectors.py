"""Vectors that may leave a client: clipped, with Gaussian noise, accounted for.

Two releases of a set of unit vectors. `rows` sends every vector by itself: what
each says must drown in noise for a small epsilon, as nothing is added up.
`cells` adds vectors up in cells around public centres first: noise that hides
one of them leaves the direction of a hundred.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax import optim
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, statement, terms

__all__ = [
  "L2_SENSITIVITY",
  "LEAST_NOISE",
  "Rows",
  "cells",
  "centres",
  "check_capacity",
  "nearest",
  "promise",
  "rows",
  "unit",
]

L2_SENSITIVITY = 1.0
"""Of both releases, when one unit is added or removed."""

LEAST_NOISE = 0.05
"""Below this noise multiplier nothing is claimed: one release would have an
epsilon of 270, which protects nobody and takes the accountant minutes."""
_ITERATIONS = 10  # of k-means


class Rows(NamedTuple):
  """Noised vectors, and the secret of who is where."""

  vectors: Float[np.ndarray, "row dim"]
  places: Int[np.ndarray, " vector"]
  """The row of each vector; it stays with the client."""


def rows(
  vectors: Float[np.ndarray, "vector dim"],
  *,
  capacity: int,
  noise_multiplier: float,
  key: Key[Array, ""],
) -> Rows:
  """Sends each vector in a row of its own, among rows that hold noise alone.

  Formal guarantee:
    Unit: one vector, where it depends on one record alone. Neighbours: sets of
    at most `capacity` vectors that differ by one (ADD_OR_REMOVE_ONE). One call
    is one Gaussian mechanism of sensitivity 1: with the secret order fixed, a
    vector of norm at most 1 stands in place of a row of zeros, and all other
    rows stay where they are; the order has the same law for both sets, and a
    mixture with equal weights is no easier to tell apart than its parts. With
    REPLACE_ONE the row moves by up to 2, which the accountant allows for by
    itself. Public: `capacity` (a bound, NOT the number of vectors), dim, noise.
    Assumed: `key` is secret and drives no other release.

  Args:
    vectors: of any length; those above 1 are shortened to 1.
    capacity: how many rows are sent, at least the number of vectors.
    noise_multiplier: standard deviation of the noise, >= 0; 0 protects nobody.
    key: secret, for this release alone.

  Returns:
    float32 [capacity, dim] with noise in every row, and the places.

  Raises:
    ValueError: if there are more vectors than rows, or a vector is not finite.
  """
  vectors = _clipped(_finite(vectors))
  check_capacity(capacity, len(vectors), "vectors")
  order_key, noise_key = jax.random.split(key)
  order = np.asarray(jax.random.permutation(order_key, capacity))
  places = order[: len(vectors)]
  table = np.zeros((capacity, vectors.shape[1]))
  table[places] = vectors
  return Rows(_noised(table, noise_multiplier, noise_key), places)


def cells(
  vectors: Float[np.ndarray, "vector dim"],
  units: Int[np.ndarray, " vector"],
  centres: Float[np.ndarray, "cell dim"],
  *,
  noise_multiplier: float,
  key: Key[Array, ""],
) -> Float[np.ndarray, "cell dim"]:
  """Adds vectors up, each in the cell of its nearest centre, and adds noise.

  Formal guarantee:
    Unit: all vectors with one number in `units`, where they depend on one
    record alone. Neighbours: sets that differ by one unit (ADD_OR_REMOVE_ONE).
    One call is one Gaussian mechanism of sensitivity 1: a unit adds a matrix
    [cell, dim] that depends on nothing else and is scaled down to Frobenius
    norm 1 where it is longer. Its cells are the same whoever else is there, to
    the last bit (`nearest`); sums are those of float64, and noise is added
    before they are rounded further. Numbers of vectors are not released; sums
    of empty cells are noise. Public: centres and noise. Assumed: `key` is
    secret and drives no other release, and a unit's vectors, too, are the same
    to the last bit whoever else is there: an encoder that rounds with the rest
    of its batch would move what lies between two cells.

  Args:
    vectors: of any length; those above 1 are shortened to 1 first.
    units: for each vector a number; equal ones are protected together.
    centres: chosen without a look at the vectors.
    noise_multiplier: standard deviation of the noise, >= 0; 0 protects nobody.
    key: secret, for this release alone.

  Returns:
    float32, a noised sum for each centre.

  Raises:
    ValueError: if a vector is not finite.
  """
  vectors = _finite(vectors)
  shape = centres.shape
  pairs = np.stack([np.asarray(units), nearest(vectors, centres)], axis=1)
  pairs, members = np.unique(pairs, axis=0, return_inverse=True)
  parts = np.zeros((len(pairs), shape[1]))  # of one unit in one cell
  np.add.at(parts, members.reshape(-1), _clipped(vectors))
  names, owners = np.unique(pairs[:, 0], return_inverse=True)
  squares = np.zeros(len(names))
  np.add.at(squares, owners, np.sum(parts**2, axis=1))
  scale = 1 / np.maximum(1, np.sqrt(squares))
  total = np.zeros(shape)
  np.add.at(total, pairs[:, 1], parts * scale[owners][:, None])
  return _noised(total, noise_multiplier, key)


def centres(
  vectors: Float[np.ndarray, "vector dim"], count: int, *, seed: int
) -> Float[np.ndarray, "cell dim"]:
  """Chooses centres of cells by k-means on the sphere.

  Formal guarantee: none is needed if the vectors are PUBLIC, as they have to
  be: centres of private vectors are private.

  Args:
    vectors: of public texts, unit vectors.
    count: how many centres, at most as many as vectors.
    seed: of the vectors to begin with; public.

  Returns:
    Unit vectors, float32. A centre that nothing is near to stays where it is.

  Raises:
    ValueError: if there are fewer vectors than centres.
  """
  if not 1 <= count <= len(vectors):
    raise ValueError(
      f"expected count of at least 1 and at most {len(vectors)}, the number of"
      f" public vectors, got {count=}: give more public text"
    )
  rng = np.random.default_rng(seed)
  found = unit(vectors[np.sort(rng.permutation(len(vectors))[:count])])
  for _ in range(_ITERATIONS):
    total = np.zeros(found.shape)
    np.add.at(total, nearest(vectors, found), vectors.astype(np.float64))
    moved = np.any(total != 0, axis=1)
    found = np.where(moved[:, None], unit(total), found)
  return found


def nearest(
  vectors: Float[np.ndarray, "vector dim"],
  centres: Float[np.ndarray, "cell dim"],
) -> Int[np.ndarray, " vector"]:
  """Returns the centre with the largest inner product for each vector.

  Both are rounded to whole numbers first, 23 bits long for 96 dims.

  Formal guarantee: the centre of a vector depends on that vector and on the
  centres alone, to the last bit, however many vectors come along and in
  whatever order they are added up. Of whole numbers so short that dim products
  of two stay below 2^53, float64 holds every partial sum as it is, so that
  nothing is left to be rounded. Products that round would send a vector between
  two centres to the one or to the other with the number of rows.

  >>> nearest(np.array([[0.0, 1.0]]), np.eye(2)).tolist()
  [1]

  Args:
    vectors: finite.
    centres: at least one; of equally near ones the first is taken.
  """
  bits = (53 - (centres.shape[1] - 1).bit_length()) // 2
  table = _whole(centres, np.max(np.abs(centres)), bits).T
  step = max(1, (1 << 23) // max(1, len(centres)))  # 64 MiB of products
  found = [np.zeros(0, np.int64)]
  for first in range(0, len(vectors), step):
    block = np.asarray(vectors[first : first + step])
    longest = np.max(np.abs(block), axis=1, keepdims=True)
    found.append(np.argmax(_whole(block, longest, bits) @ table, axis=1))
  return np.concatenate(found)


def unit(vectors: Float[np.ndarray, "row dim"]) -> np.ndarray:
  """Returns rows of length 1, float32; rows of zeros stay.

  >>> unit(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
  [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]

  Args:
    vectors: finite.
  """
  norms = np.linalg.norm(np.asarray(vectors, np.float64), axis=1)
  norms = np.where(norms > 0, norms, 1)
  return (vectors / norms[:, None]).astype(np.float32)


def promise(
  *,
  identifier: str,
  unit: str,
  mechanism: str,
  capacity: int,
  noise_multiplier: float,
  delta: float | None,
  relation: str,
  encoder: statement.PrivacyStatement,
  releases: int = 1,
) -> statement.PrivacyStatement:
  """States what releases by `rows` or `cells` have earned.

  Formal guarantee:
    That of one Gaussian mechanism a release, composed with `encoder`. This is
    the point that is easily lost: a vector depends on one record alone only if
    the encoder is public. One that was trained on the client's records moves
    every vector when one record changes; then the noise here promises nothing,
    and only an encoder whose own release was private adds up to a claim. With
    the statement of an encoder trained without privacy, the result has no claim.

  Args:
    identifier: names the release and no other: run, client and round.
    unit: what one record is, e.g. "query".
    mechanism: what was clipped and noised, in words.
    capacity: a public bound of the number of units.
    noise_multiplier: of the noise, >= 0.
    delta: of the claim; None: 1 / (2 capacity).
    relation: "ADD_OR_REMOVE_ONE" or "REPLACE_ONE".
    encoder: what is promised about the encoder of the vectors.
    releases: how many, with independent noise.

  Returns:
    The statement, with the encoder's releases in its ledger; one that claims
    nothing where the noise is below `LEAST_NOISE`.
  """
  if noise_multiplier < LEAST_NOISE:
    return statement.non_private(
      f"Noise of standard deviation {noise_multiplier:g} hides no vector of"
      f" length 1 ({identifier}).",
      unit=unit,
      relation=relation,
    )
  # Every unit is in: a Poisson sample of probability 1 that is never cut.
  sampler = sampling.Poisson(
    num_examples=capacity,
    expected_batch_size=capacity,
    max_batch_size=capacity + 1,
  )
  own = claim_lib.Claim(
    sampler=sampler,
    steps=releases,
    noise_multiplier=noise_multiplier,
    l2_clip_norm=L2_SENSITIVITY,
    delta=delta,
    relation=relation,
    words=terms.vectors(unit, mechanism, capacity=capacity),
  ).statement(identifier)
  return statement.compose([own, encoder])


def check_capacity(capacity: int, count: int, units: str) -> None:
  """Refuses more units than a public bound, without saying how many.

  Args:
    capacity: the bound.
    count: of the units, which is private.
    units: what they are called.

  Raises:
    ValueError: if there are more.
  """
  if count > capacity:
    raise ValueError(
      f"expected at most capacity={capacity} {units}, got more: raise the"
      " public bound before anything is sent"
    )


def _finite(vectors: Any) -> np.ndarray:
  """Returns float32 vectors, or refuses them."""
  vectors = np.asarray(vectors, np.float32)
  if vectors.ndim != 2 or not np.isfinite(vectors).all():
    raise ValueError(
      "expected finite vectors of two axes, got others: look at the encoder"
    )
  return vectors


def _clipped(vectors: np.ndarray) -> np.ndarray:
  """Shortens rows to norm 1, in float64."""
  vectors = vectors.astype(np.float64)
  norms = np.linalg.norm(vectors, axis=1)
  return vectors / np.maximum(1, norms)[:, None]


def _whole(values: np.ndarray, largest: Any, bits: int) -> np.ndarray:
  """Scales by a power of two and rounds to whole numbers, at most 2^bits.

  Every number by itself and without error but the last rounding, so that equal
  ones stay equal wherever they stand.
  """
  _, exponent = np.frexp(np.asarray(largest, np.float64))
  return np.rint(np.ldexp(np.asarray(values, np.float64), bits - exponent))


def _noised(
  table: np.ndarray, noise_multiplier: float, key: Key[Array, ""]
) -> np.ndarray:
  """Adds noise of standard deviation noise_multiplier x L2_SENSITIVITY.

  To float64, and rounds the result: a sum of thousands that was rounded to
  float32 before would move by more than the sensitivity.
  """
  transform = optim.privatize(
    l2_sensitivity=L2_SENSITIVITY,
    noise_multiplier=noise_multiplier,
    denominator=1.0,
    key=key,
  )
  nothing = jnp.zeros(table.shape, jnp.float32)
  noise, _ = transform.update(nothing, transform.init(None))
  return (table + np.asarray(noise, np.float64)).astype(np.float32)
