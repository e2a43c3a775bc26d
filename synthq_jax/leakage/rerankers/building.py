"""Builds a reranker of any kind on a public T5 and its vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any

from synthq_jax import typing
from synthq_jax.leakage.rerankers import duet, mono, reranker, terms, training
from synthq_jax.models import t5_config

__all__ = ["BERT", "KINDS", "OF_TERMS", "Settings", "build"]

BERT = "monoBERT"
"""The kind that may start from a Hugging Face BERT."""

OF_TERMS: dict[str, Callable[..., reranker.Reranker]] = {
  "Duet": duet.Duet,
  "KNRM": terms.KNRM,
  "PACRR": terms.PACRR,
}
"""The kinds that weigh terms by their document frequency."""

KINDS = ("monoT5", BERT, *OF_TERMS)
"""What `build` knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Which reranker, what it reads, and how it is trained."""

  kind: str
  """One of `KINDS`."""
  query_length: int = 24
  """Pieces of a query that are read."""
  document_length: int = 128
  """Pieces of a document that are read; what is longer is cut."""
  recipe: training.Recipe = dataclasses.field(default_factory=training.Recipe)
  """Epochs, batches and learning rate."""


def build(
  settings: Settings,
  *,
  vocabulary: Any,
  params: typing.Params,
  config: t5_config.T5Config,
  idf: Any = None,
  bert: str | None = None,
) -> reranker.Reranker:
  """Builds a reranker, not trained yet.

  Args:
    settings: which one.
    vocabulary: of the T5.
    params: of the T5: monoT5 starts from them, all others but a given BERT from
      its vectors of pieces.
    config: its shape.
    idf: of `terms.inverse_document_frequencies`; None: 1 for all.
    bert: folder of the Hugging Face BERT that monoBERT starts from; None: a new,
      small one on the vocabulary.

  Raises:
    ValueError: if the kind is unknown, monoT5 is given no T5, or something
      cannot be read.
  """
  kind, query_length = settings.kind, settings.query_length
  lengths = {
    "length": query_length + settings.document_length,
    "query_length": query_length,
  }
  vectors = params["token_embedder"]["embedding"]
  if kind == BERT:
    if bert is not None:
      return mono.bert_from_folder(bert, **lengths)
    return mono.bert_from_sentencepiece(
      vocabulary, embeddings=vectors, **lengths
    )
  if kind == "monoT5":
    if not isinstance(config, t5_config.T5Config):
      raise ValueError("expected a T5 to start monoT5 from, got static vectors")
    return mono.MonoT5(
      vocabulary=vocabulary, config=config, start=params, **lengths
    )
  if kind not in OF_TERMS:
    raise ValueError(f"expected a reranker of {', '.join(KINDS)}, got {kind!r}")
  read = terms.Terms(
    vocabulary=vocabulary,
    embeddings=vectors,
    query_length=query_length,
    document_length=settings.document_length,
    idf=idf,
  )
  return OF_TERMS[kind](terms=read)
