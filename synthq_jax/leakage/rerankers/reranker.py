"""The frame of all rerankers: rows in, a score or a loss of pairs out."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing

__all__ = [
  "Features",
  "Triple",
  "Reranker",
  "Rngs",
  "check_vocabulary",
  "cross_entropy",
  "encode",
  "hinge",
  "softmax",
]

Features = dict[str, np.ndarray]
"""Arrays by name, all with a leading axis of rows; a row is a pair of texts."""
Rngs = dict[str, jax.Array]
"""Keys by what they are for, as Flax takes them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triple:
  """A query, a document that answers it, and one that does not."""

  query: str
  """The text of the query."""
  relevant: str
  """The text of a relevant document."""
  non_relevant: str
  """The text of a document that is not relevant."""


def hinge(logits: Float[Array, "batch 1"]) -> Float[Array, ""]:
  """Returns the mean of max(0, 1 - tanh(s+) + tanh(s-)).

  >>> scores = jnp.arctanh(jnp.array([[0.5], [0.5], [0.5], [-0.5]]))
  >>> round(hinge(scores).item(), 4)
  0.5
  """
  scores = jnp.tanh(logits[:, 0])
  return jnp.mean(jax.nn.relu(1.0 - scores[0::2] + scores[1::2]))


def softmax(logits: Float[Array, "batch 1"]) -> Float[Array, ""]:
  """Returns the mean of -log(exp(s+) / (exp(s+) + exp(s-))).

  >>> round(softmax(jnp.array([[1.0], [1.0]])).item(), 4)
  0.6931
  """
  return jnp.mean(jax.nn.softplus(logits[1::2, 0] - logits[0::2, 0]))


def cross_entropy(logits: Float[Array, "batch label"]) -> Float[Array, ""]:
  """Returns the mean cross-entropy of rows whose labels are 1, 0, 1, 0, ...

  Args:
    logits: of the labels 0 and 1, not relevant and relevant; or of 1 alone,
      which stands beside a 0.
  """
  if logits.shape[1] == 1:  # log sigmoid(x) is log softmax of 0 and x
    logits = jnp.pad(logits, ((0, 0), (1, 0)))
  logs = jax.nn.log_softmax(logits)
  return -(jnp.mean(logs[0::2, 1]) + jnp.mean(logs[1::2, 0])) / 2


class Reranker(abc.ABC):
  """A model that scores documents for queries.

  Rerankers are frozen dataclasses without parameters of their own, equal only
  to themselves: programs are compiled once for a reranker and a shape, however
  often it is trained. Their `repr` shows the settings, and no large table: the
  folder of a training is known by it.
  """

  name: ClassVar[str]
  """What tables call it."""
  padded: ClassVar[tuple[str, ...]]
  """The features that end in padding, which is 0: batches of short texts are
  cut to fewer columns, and no score depends on how many there are."""
  objective: ClassVar[Callable[[Array], Array]]
  """What training minimises, of the logits of pairs of rows: `cross_entropy`,
  `softmax` or `hinge`."""

  @abc.abstractmethod
  def init(self, key: jax.Array) -> typing.Params:
    """Returns the parameters before training: given ones, or random ones."""

  @abc.abstractmethod
  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> Features:
    """Returns a row of numbers for each query and its document."""

  @abc.abstractmethod
  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs: Rngs | None = None
  ) -> Float[Array, "batch label"]:
    """Returns one number for each row, or the logits of "no" and "yes".

    Args:
      params: of this reranker.
      batch: features of the rows; a row's logits depend on that row alone.
      rngs: "dropout", the key of its randomness; None switches it off.
    """

  def score(
    self, params: typing.Params, batch: typing.Batch
  ) -> Float[Array, " batch"]:
    """Returns the score of each row, higher for more relevant ones.

    It is the only logit, or the logarithm of the softmax at the second of two.

    Args:
      params: of this reranker.
      batch: features of the rows; a row's score depends on that row alone.
    """
    logits = self.logits(params, batch)
    if logits.shape[1] == 1:
      return logits[:, 0]
    return jax.nn.log_softmax(logits)[:, 1]

  def loss(
    self, params: typing.Params, batch: typing.Batch, rngs: Rngs | None = None
  ) -> Float[Array, ""]:
    """Returns the mean loss of the rows.

    Args:
      params: of this reranker.
      batch: features of pairs of rows: row 2i holds the relevant document of a
        query, row 2i + 1 the one that is not relevant.
      rngs: as in `logits`.
    """
    return type(self).objective(self.logits(params, batch, rngs))


def encode(vocabulary: Any, texts: Sequence[str]) -> list[list[int]]:
  """Returns the pieces of each text; equal texts are read once."""
  known = {text: vocabulary.encode(text) for text in dict.fromkeys(texts)}
  return [known[text] for text in texts]


def check_vocabulary(name: str, vocabulary: Any, rows: int) -> None:
  """Refuses a table of embeddings that lacks pieces of the vocabulary.

  Raises:
    ValueError: if it does.
  """
  if rows < vocabulary.vocab_size:
    raise ValueError(
      f"{name}: expected embeddings of the vocabulary's"
      f" {vocabulary.vocab_size} pieces, got {rows} rows: give the vocabulary"
      " that belongs to the model"
    )
