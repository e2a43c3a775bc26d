"""The rerankers of the study: settings, and what is built from them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from synthq_jax import artifacts
from synthq_jax.data import shipped, vocabulary
from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import mono
from synthq_jax.leakage.rerankers import terms as terms_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import _fingerprints, config_types

__all__ = ["KINDS", "Model", "build", "digest", "note"]

KINDS = ("monoT5", "monoBERT", "Duet", "KNRM", "PACRR")
"""What `Model.kind` may be."""

_BERT = "monoBERT"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """One reranker and how it is trained."""

  kind: str
  """One of `KINDS`."""
  name: str = ""
  """In tables, and a folder; "": the kind."""
  seeds: int = 1
  """Repetitions, each with training sets and a start of its own."""
  recipe: rerankers.Recipe = dataclasses.field(default_factory=rerankers.Recipe)
  """How it is trained."""
  query_length: int = 24
  """Pieces of a query that are read."""
  document_length: int = 128
  """Pieces of a document that are read; what is longer is cut."""
  checkpoint: str | None = None
  """monoBERT: folder of a Hugging Face BERT; None: a new, small one on the
  package's vocabulary. The others: folder of the T5 that monoT5 starts from,
  and whose vectors of pieces they start from; None: the package's."""
  vocabulary: str | None = None
  """SentencePiece model of the T5; None: the package's. A BERT brings its own."""

  def __post_init__(self):
    config_types.one_of(self, "kind", KINDS)
    config_types.at_least(self, 1, "seeds", "query_length", "document_length")
    if not self.name:
      object.__setattr__(self, "name", self.kind)
    if not config_types.is_file_name(self.name):
      raise ValueError(
        f"leakage_study.Model.name must be a word for a folder, got"
        f" {self.name!r}"
      )
    needs_both = self.kind != _BERT and self.checkpoint is not None
    if needs_both != (self.vocabulary is not None):
      raise ValueError(
        "leakage_study.Model.vocabulary must be given with the checkpoint of a"
        f" T5, and only then, got kind={self.kind!r},"
        f" checkpoint={self.checkpoint!r} and vocabulary={self.vocabulary!r}"
      )


def build(model: Model, documents: Mapping[str, str]) -> rerankers.Reranker:
  """Builds a reranker.

  Args:
    model: its settings.
    documents: texts in which pieces are counted for their document frequency.

  Raises:
    ValueError: if a checkpoint or vocabulary cannot be read.
  """
  lengths = {
    "length": model.query_length + model.document_length,
    "query_length": model.query_length,
  }
  if model.kind == _BERT and model.checkpoint is not None:
    return mono.bert_from_folder(model.checkpoint, **lengths)
  pieces = _vocabulary(model)
  params, config = t5_checkpoints.load(model.checkpoint or shipped.DIRECTORY)
  vectors = params["token_embedder"]["embedding"]
  if model.kind == _BERT:
    return mono.bert_from_sentencepiece(pieces, embeddings=vectors, **lengths)
  if model.kind == "monoT5":
    return rerankers.MonoT5(
      vocabulary=pieces, config=config, start=params, **lengths
    )
  terms = rerankers.Terms(
    vocabulary=pieces,
    embeddings=vectors,
    query_length=model.query_length,
    document_length=model.document_length,
    idf=terms_lib.inverse_document_frequencies(pieces, documents.values()),
  )
  return _OF_TERMS[model.kind](terms=terms)


_OF_TERMS: dict[str, Callable[..., Any]] = {
  "Duet": rerankers.Duet,
  "KNRM": rerankers.KNRM,
  "PACRR": rerankers.PACRR,
}


def _vocabulary(model: Model) -> Any:
  if model.vocabulary is not None:
    return vocabulary.load(model.vocabulary)
  return vocabulary.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def digest(model: Model) -> str:
  """Returns what the start of a training depends on, beside its settings."""
  if model.kind == _BERT and model.checkpoint is not None:
    files = sorted(pathlib.Path(model.checkpoint).glob("*"))
    return artifacts.fingerprint(
      [(p.name, _fingerprints.of_file(p)) for p in files if p.is_file()]
    )
  place = pathlib.Path(model.checkpoint or shipped.DIRECTORY)
  return artifacts.fingerprint(
    _fingerprints.of_checkpoint(place),
    _fingerprints.of_file(model.vocabulary or shipped.VOCABULARY),
  )


def note(model: Model) -> str:
  """Says in one sentence what a reader must know of a reranker."""
  recipe = model.recipe
  length = (
    f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
  )
  return (
    f"{model.name} {_start(model)}; {length} in batches of"
    f" {recipe.batch_size // 2} instances, learning rate"
    f" {recipe.learning_rate:g}; reads {model.query_length} pieces of a query"
    f" and {model.document_length} of a document; repetitions: {model.seeds}."
  )


def _start(model: Model) -> str:
  given = model.checkpoint is not None
  if model.kind == _BERT:
    if given:
      return "starts from a public BERT"
    return (
      "is a new BERT of two layers that was not pre-trained; it starts at random"
      " but for the vectors of pieces, the package's T5's"
    )
  whose = "a given T5" if given else "the package's small T5"
  if model.kind == "monoT5":
    return f"starts from {whose}"
  return f"starts at random but for the vectors of pieces, {whose}'s"
