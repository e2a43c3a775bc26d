"""monoT5 and monoBERT: transformers that read query and document together.

References:
  Nogueira, Jiang, Pradeep, Lin: Document Ranking with a Pretrained
  Sequence-to-Sequence Model. Findings of EMNLP 2020, section 3.
  Nogueira, Cho: Passage Re-ranking with BERT. 2019, arXiv:1901.04085, section 3.
"""

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.data import wordpiece
from synthq_jax.leakage.rerankers import reranker
from synthq_jax.models import bert, t5, t5_config

__all__ = ["MonoBERT", "MonoT5", "bert_from_folder", "bert_from_sentencepiece"]

_LABELS = 2
_WORDS = ("false", "true")  # of monoT5: not relevant, relevant
_SMALL = {"num_heads": 4, "mlp_dim": 512, "num_layers": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Mono(reranker.Reranker):
  """Base of transformers that read query and document as one row."""

  vocabulary: Any = dataclasses.field(repr=False)
  """Tokenizer with `encode` and `vocab_size`; for a T5, one from
  `data.vocabulary.load`."""
  start: typing.Params = dataclasses.field(repr=False)
  """Initial parameters; those that a BERT lacks, such as a classifier, are drawn
  at random."""
  length: int = 512
  """Maximum number of pieces of a row."""
  query_length: int = 64
  """Maximum number of pieces of a query, as in monoBERT's paper."""
  objective = staticmethod(reranker.cross_entropy)

  def __post_init__(self):
    reranker.check_vocabulary(
      self.name, self.vocabulary, self.config.vocab_size
    )

  @abc.abstractmethod
  def _frame(self) -> tuple[list[int], list[int], list[int]]:
    """Returns the pieces before the query, after it, and after the document."""

  def _rows(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> tuple[np.ndarray, list[int]]:
    """Returns padded rows and the position in each where the document begins.

    Queries are cut to `query_length` pieces, documents to the remaining room.
    """
    before, between, after = self._frame()
    rows, starts = [], []
    sides = (
      reranker.encode(self.vocabulary, texts) for texts in (queries, documents)
    )
    for query, document in zip(*sides, strict=True):
      head = [*before, *query[: self.query_length], *between]
      room = self.length - len(head) - len(after)
      rows.append([*head, *document[:room], *after])
      starts.append(len(head))
    return vocabulary_lib.pad(rows, self.length), starts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MonoT5(_Mono):
  """Scores a document by the probability of "true" as the T5's first word.

  The input is "Query: QUERY Document: DOCUMENT Relevant:". The query is cut to
  `query_length`, the document to the room left. The score is the log-softmax of
  the piece
  "true" over the logits of the pieces "true" and "false". Training minimises the
  cross-entropy of the two.

  "true" and "false" are single pieces of T5's vocabulary and of the shipped one.
  If a vocabulary splits them, the first pieces that differ replace them, and
  training gives these pieces their meaning. Released models for other languages
  use other words.
  """

  config: t5_config.T5Config
  """Configuration of the T5; training uses its dropout."""
  name: ClassVar[str] = "monoT5"
  padded: ClassVar[tuple[str, ...]] = ("tokens",)

  def __post_init__(self):
    super().__post_init__()
    frame = sum(len(part) for part in self._frame())
    if self.query_length < 1 or self.length <= frame + self.query_length:
      raise ValueError(
        "expected query_length of at least 1 and room for a document, got"
        f" query_length={self.query_length}, length={self.length}: the words"
        f" around them take {frame} pieces; set a greater length"
      )

  def labels(self) -> tuple[int, int]:
    """Returns the ids of the pieces for "false" and "true".

    Raises:
      ValueError: if the vocabulary encodes both words alike.
    """
    pieces = (self.vocabulary.encode(word) for word in _WORDS)
    for false, true in zip(*pieces, strict=False):
      if false != true:
        return false, true
    raise ValueError(
      f"expected a vocabulary that tells the words={_WORDS} apart, got the same"
      " pieces for both: give the vocabulary of a public T5"
    )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns `start`."""
    del key
    return jax.tree.map(jnp.asarray, self.start)

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> reranker.Features:
    """Returns the feature "tokens", the inputs of the T5."""
    return {"tokens": self._rows(queries, documents)[0]}

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch 2"]:
    """Returns the logits of "false" and "true" as the first output piece."""
    start = jnp.zeros((len(batch["tokens"]), 1), jnp.int32)
    logits = t5.Transformer(self.config).apply(
      {"params": params},
      batch["tokens"],
      start,
      enable_dropout=rngs is not None,
      rngs=rngs,
    )
    return logits[:, 0][:, jnp.array(self.labels())]

  def _frame(self) -> tuple[list[int], list[int], list[int]]:
    encode = self.vocabulary.encode
    return (
      encode("Query:"),
      encode("Document:"),
      [*encode("Relevant:"), self.vocabulary.eos_id],
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MonoBERT(_Mono):
  """Scores a document by a label of "[CLS] QUERY [SEP] DOCUMENT [SEP]".

  The query with its frame is segment 0, the document with its [SEP] segment 1;
  both are cut to their lengths. With two labels, the score is the log-softmax of
  label 1, "relevant". With one label, as in public cross-encoders, the score is
  its logit, and training uses its sigmoid. Training minimises the cross-entropy.

  `bert_from_folder` builds a reranker from a public BERT,
  `bert_from_sentencepiece` a new one of any size on a vocabulary of this project.
  """

  cls_id: int
  """Id of the piece that begins a row."""
  sep_id: int
  """Id of the piece that ends query and document."""
  config: bert.BertConfig
  """Configuration of the BERT, with one or two labels."""
  name: ClassVar[str] = "monoBERT"
  padded: ClassVar[tuple[str, ...]] = ("tokens", "segments")

  def __post_init__(self):
    super().__post_init__()
    if self.config.num_labels not in (1, _LABELS):
      raise ValueError(
        "expected a BERT with one or two labels, got"
        f" num_labels={self.config.num_labels}: give a BERT for ranking"
      )
    if not self.query_length + 3 < self.length <= self.config.max_length:
      raise ValueError(
        "expected room for query and document in at most"
        f" {self.config.max_length} positions, got length={self.length},"
        f" query_length={self.query_length}: change them"
      )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns `start`, completed by random parameters."""
    fresh = bert.init_params(self.config, key)
    return fresh | jax.tree.map(jnp.asarray, dict(self.start))

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> reranker.Features:
    """Returns the features "tokens" and "segments"."""
    tokens, starts = self._rows(queries, documents)
    positions = np.arange(self.length)[None]
    in_document = (positions >= np.array(starts)[:, None]) & (tokens != 0)
    return {"tokens": tokens, "segments": in_document.astype(np.int32)}

  def logits(
    self, params: typing.Params, batch: typing.Batch, rngs=None
  ) -> Float[Array, "batch label"]:
    """Returns the logits of the labels."""
    _, logits = bert.Bert(self.config).apply(
      {"params": params},
      batch["tokens"],
      batch["segments"],
      deterministic=rngs is None,
      rngs=rngs,
    )
    return logits

  def _frame(self) -> tuple[list[int], list[int], list[int]]:
    return [self.cls_id], [self.sep_id], [self.sep_id]


def bert_from_folder(folder: str | os.PathLike, **options: Any) -> MonoBERT:
  """Builds a reranker from a public BERT; needs the extra `bert`.

  Args:
    folder: folder with config.json, model.safetensors and the vocabulary, as
      Hugging Face writes them. Without a classifier, a new classifier has two
      labels.
    **options: `length` and `query_length` of `MonoBERT`.

  Raises:
    ValueError: if a file is missing in the folder, or does not fit.
  """
  params, config = bert.load(folder)
  pieces = wordpiece.load(folder)
  return MonoBERT(
    vocabulary=pieces,
    cls_id=pieces.cls_id,
    sep_id=pieces.sep_id,
    config=dataclasses.replace(
      config, has_pooler=True, num_labels=config.num_labels or _LABELS
    ),
    start=params,
    **({"length": min(512, config.max_length)} | options),
  )


def bert_from_sentencepiece(
  vocabulary: Any,
  *,
  embeddings: Any,
  length: int,
  query_length: int,
  **shape: Any,
) -> MonoBERT:
  """Builds a new BERT on a vocabulary of this project.

  EOS serves as [SEP], and the vocabulary's last piece as [CLS]. The last piece is
  a sentinel, if there are any, so no text holds it.

  Args:
    vocabulary: vocabulary from `data.vocabulary.load`.
    embeddings: initial vectors of the pieces [vocab, dim], scaled to BERT's
      initial size.
    length, query_length: fields of `MonoBERT`.
    **shape: fields of `bert.BertConfig` that differ from a small BERT.
  """
  vectors = np.asarray(embeddings, np.float32)
  vocab_size, dim = vectors.shape
  shape = {"vocab_size": vocab_size, **_SMALL, **shape, "emb_dim": dim}
  return MonoBERT(
    vocabulary=vocabulary,
    cls_id=vocabulary.vocab_size - 1,
    sep_id=vocabulary.eos_id,
    config=bert.BertConfig(**shape, num_labels=_LABELS, max_length=length),
    start={"word_embedding": 0.02 * vectors / vectors.std()},
    length=length,
    query_length=query_length,
  )
