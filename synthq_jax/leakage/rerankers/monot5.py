"""monoT5: a T5 that says whether a document is relevant.

References:
  Nogueira, Jiang, Pradeep, Lin: Document Ranking with a Pretrained
  Sequence-to-Sequence Model. Findings of EMNLP 2020, section 3.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from synthq_jax import typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage.rerankers import _losses, _tokens, interface
from synthq_jax.models import t5, t5_config

__all__ = ["MonoT5"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MonoT5:
  """Scores a document by how likely "true" is as the T5's first word.

  The input is "Query: QUERY Document: DOCUMENT Relevant:", in which the
  document is cut so that everything else stays. The score is the logarithm of
  the softmax over the logits of two pieces, those of "true" and "false", at
  "true". Training minimises the cross-entropy of the two.

  "true" and "false" are single pieces of T5's own vocabulary and of the shipped
  one. Where a vocabulary splits them, the first pieces in which the two differ
  stand for them: training gives them their meaning. Released models for other
  languages have words of their own.
  """

  vocabulary: Any = dataclasses.field(repr=False)
  """The T5's SentencePiece vocabulary, from `data.vocabulary.load`."""
  config: t5_config.T5Config
  """The shape of the T5; its dropout is the training's."""
  start: typing.Params | None = dataclasses.field(default=None, repr=False)
  """The parameters that training starts from; random ones if not given."""
  length: int = 512
  """Pieces of an input at most."""
  query_length: int = 64
  """Pieces of a query that are kept."""
  words: tuple[str, str] = ("false", "true")
  """What the T5 says of documents that are not relevant, and that are."""
  name: ClassVar[str] = "monoT5"
  padded: ClassVar[tuple[str, ...]] = ("tokens",)

  def __post_init__(self):
    _tokens.check_vocabulary(self.name, self.vocabulary, self.config.vocab_size)
    frame = sum(len(part) for part in self._frame())
    if self.query_length < 1 or self.length <= frame + self.query_length:
      raise ValueError(
        "expected query_length of at least 1 and room for a document, got"
        f" query_length={self.query_length}, length={self.length}: the words"
        f" around them take {frame} pieces"
      )

  def labels(self) -> tuple[int, int]:
    """Returns the ids of the pieces for "false" and "true".

    Raises:
      ValueError: if the vocabulary reads both words alike.
    """
    pieces = (self.vocabulary.encode(word) for word in self.words)
    for false, true in zip(*pieces, strict=False):
      if false != true:
        return false, true
    raise ValueError(
      f"expected a vocabulary that tells the words={self.words} apart, got the"
      " same pieces for both: give other words"
    )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the given parameters, or random ones."""
    if self.start is None:
      return _init(key, config=self.config)
    return jax.tree.map(jnp.asarray, self.start)

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> interface.Features:
    """Returns "tokens", the inputs of the T5."""
    before, between, after = self._frame()
    rows, _ = _tokens.joined(
      self.vocabulary,
      queries,
      documents,
      length=self.length,
      query_length=self.query_length,
      before=before,
      between=between,
      after=after,
    )
    return {"tokens": vocabulary_lib.pad(rows, self.length)}

  def score(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Returns log p("true") of each row."""
    return self._log_probabilities(params, batch, key)[:, 1]

  def loss(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, ""]:
    """Returns the mean cross-entropy of "true" and "false"."""
    return _losses.cross_entropy(self._log_probabilities(params, batch, key))

  def logits(
    self,
    params: typing.Params,
    tokens: Array,
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, "batch vocab"]:
    """Returns the logits of the first piece that the T5 would write."""
    start = jnp.zeros((len(tokens), 1), jnp.int32)
    logits = t5.Transformer(self.config).apply(
      {"params": params},
      tokens,
      start,
      enable_dropout=key is not None,
      rngs=None if key is None else {"dropout": key},
    )
    return logits[:, 0]

  def _log_probabilities(self, params, batch, key) -> Array:
    """Returns log p of "false" and "true", [batch, 2]."""
    logits = self.logits(params, batch["tokens"], key=key)
    return jax.nn.log_softmax(logits[:, jnp.array(self.labels())])

  def _frame(self) -> tuple[list[int], list[int], list[int]]:
    """Returns the pieces before the query, between the two, and at the end."""
    encode = self.vocabulary.encode
    return (
      encode("Query:"),
      encode("Document:"),
      [*encode("Relevant:"), vocabulary_lib.EOS_ID],
    )


@functools.partial(jax.jit, static_argnames="config")
def _init(key: jax.Array, *, config: t5_config.T5Config) -> typing.Params:
  return t5.init_params(config, key)
