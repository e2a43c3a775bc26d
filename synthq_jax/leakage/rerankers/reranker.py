"""Base class and losses of all rerankers: scores of rows, losses of pairs."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing

__all__ = [
  "Features",
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
"""Random keys by use, such as "dropout", in Flax's form."""


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
    logits: logits of the labels 0 (not relevant) and 1 (relevant), or of label 1
      alone; the logit of label 0 is then 0.
  """
  if logits.shape[1] == 1:  # log sigmoid(x) is log softmax of 0 and x
    logits = jnp.pad(logits, ((0, 0), (1, 0)))
  logs = jax.nn.log_softmax(logits)
  return -(jnp.mean(logs[0::2, 1]) + jnp.mean(logs[1::2, 0])) / 2


class Reranker(abc.ABC):
  """A model that scores documents for queries.

  Rerankers are frozen dataclasses that hold no trained parameters and equal only
  themselves. So programs are compiled once for a reranker and a shape, however
  often it is trained. Their `repr` shows the settings without large tables; it
  identifies the folder of a training.
  """

  name: ClassVar[str]
  """Name in tables."""
  padded: ClassVar[tuple[str, ...]]
  """Features that end in padding (0). Batches of short texts are cut to fewer
  columns; no score depends on the number of columns."""
  objective: ClassVar[Callable[[Array], Array]]
  """Training loss of the logits of pairs of rows: `cross_entropy`, `softmax` or
  `hinge`."""

  @abc.abstractmethod
  def init(self, key: jax.Array) -> typing.Params:
    """Returns the initial parameters, given or random."""

  @abc.abstractmethod
  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> Features:
    """Returns a row of numbers for each pair of a query and a document."""

  @abc.abstractmethod
  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs: Rngs | None = None
  ) -> Float[Array, "batch label"]:
    """Returns one logit for each row, or the logits of "no" and "yes".

    Args:
      params: parameters of this reranker.
      batch: features of the rows; a row's logits depend on that row alone.
      rngs: random key of "dropout", or None for no dropout.
    """

  def score(
    self, params: typing.Params, batch: typing.Batch
  ) -> Float[Array, " batch"]:
    """Returns the score of each row, higher for more relevant documents.

    The score is the only logit, or the log-softmax of the second of two logits.

    Args:
      params: parameters of this reranker.
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
      params: parameters of this reranker.
      batch: features of pairs of rows: row 2i holds the relevant document of a
        query, row 2i + 1 the non-relevant one.
      rngs: as in `logits`.
    """
    return type(self).objective(self.logits(params, batch, rngs))


def encode(vocabulary: Any, texts: Sequence[str]) -> list[list[int]]:
  """Tokenizes texts into piece ids, equal texts only once."""
  pieces = {text: vocabulary.encode(text) for text in dict.fromkeys(texts)}
  return [pieces[text] for text in texts]


def check_vocabulary(name: str, vocabulary: Any, rows: int) -> None:
  """Refuses a table with fewer rows than the vocabulary has pieces.

  Raises:
    ValueError: if the table has too few rows.
  """
  if rows < vocabulary.vocab_size:
    raise ValueError(
      f"{name}: expected embeddings of the vocabulary's"
      f" {vocabulary.vocab_size} pieces, got {rows} rows: give the vocabulary"
      " that belongs to the model"
    )
