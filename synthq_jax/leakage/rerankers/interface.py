"""What a reranker is, and what it is trained on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing

__all__ = ["Features", "Instance", "Reranker"]

Features = dict[str, np.ndarray]
"""Arrays by name, all with a leading axis of rows; a row is a pair of texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
  """A query, a document that answers it, and one that does not."""

  query: str
  """The text of the query."""
  relevant: str
  """The text of a relevant document."""
  non_relevant: str
  """The text of a document that is not relevant."""


class Reranker(Protocol):
  """A model that scores documents for queries.

  Rerankers are frozen dataclasses without parameters of their own, equal only
  to themselves: programs are compiled once for a reranker and a shape, however
  often it is trained. Their `repr` shows the settings, and no large table: the
  folder of a training is known by it.
  """

  name: str
  """What tables call it."""
  padded: tuple[str, ...]
  """The features that end in padding, which is 0: batches of short texts are
  cut to fewer columns, and no score depends on how many there are."""

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the parameters before training: given ones, or random ones."""

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> Features:
    """Returns a row of numbers for each query and its document."""

  def score(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Returns the score of each row, higher for more relevant ones.

    Args:
      params: of this reranker.
      batch: features of the rows; a row's score depends on that row alone.
      key: randomness of dropout; None switches it off.
    """

  def loss(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, ""]:
    """Returns the mean loss of the rows.

    Args:
      params: of this reranker.
      batch: features of pairs of rows: row 2i holds the relevant document of a
        query, row 2i + 1 the one that is not relevant.
      key: randomness of dropout; None switches it off.
    """
