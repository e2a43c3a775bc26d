"""Builds a reranker of any kind on a public T5 and its vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import Any

from synthq_jax import typing
from synthq_jax.leakage.rerankers import duet, mono, reranker, terms, training
from synthq_jax.models import t5_config

__all__ = ["BERT", "KINDS", "TERM_RERANKERS", "Settings", "build"]

BERT = "monoBERT"
"""Kind of reranker that may start from a Hugging Face BERT."""

TERM_RERANKERS: dict[str, Callable[..., reranker.Reranker]] = {
  "Duet": duet.Duet,
  "KNRM": terms.KNRM,
  "PACRR": terms.PACRR,
}
"""Kinds of rerankers that may weight terms by inverse document frequency."""

KINDS = ("monoT5", BERT, *TERM_RERANKERS)
"""Kinds of rerankers that `build` accepts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Kind, input lengths and training recipe of a reranker."""

  kind: str
  """One of `KINDS`."""
  query_length: int = 24
  """Pieces of a query; longer queries are cut."""
  document_length: int = 128
  """Pieces of a document; longer documents are cut."""
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
  """Builds an untrained reranker.

  Args:
    settings: kind and input lengths.
    vocabulary: vocabulary of the T5.
    params: parameters of the T5. monoT5 starts from all of them, a BERT from
      `bert` from none, the other rerankers from the embeddings of pieces.
    config: configuration of the T5.
    idf: weights from `terms.inverse_document_frequencies`, or None for 1.
    bert: folder of the Hugging Face BERT that monoBERT starts from; None for a
      new, small BERT on the vocabulary.

  Raises:
    ValueError: if the kind is unknown, monoT5 is given no T5, or a file of the
      BERT cannot be read.
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
      raise ValueError(
        "expected a T5 to start monoT5 from, got static vectors: give a T5, or"
        " choose another kind"
      )
    return mono.MonoT5(
      vocabulary=vocabulary, config=config, start=params, **lengths
    )
  if kind not in TERM_RERANKERS:
    raise ValueError(f"expected a reranker of {', '.join(KINDS)}, got {kind!r}")
  lexicon = terms.Terms(
    vocabulary=vocabulary,
    embeddings=vectors,
    query_length=query_length,
    document_length=settings.document_length,
    idf=idf,
  )
  return TERM_RERANKERS[kind](terms=lexicon)
