"""The rerankers of the study: settings, and what is built from them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from synthq_jax import artifacts
from synthq_jax.data import shipped, vocabulary
from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import terms as terms_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import _fingerprints, config_types

__all__ = ["KINDS", "Model", "build", "digest", "note"]

KINDS = ("monoT5", "Duet", "KNRM", "PACRR")
"""What `Model.kind` may be."""


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
  """Folder of the T5 that monoT5 starts from, and whose vectors of pieces the
  others start from; None: the one that comes with the package."""
  vocabulary: str | None = None
  """Its SentencePiece model; None: the one that comes with the package."""

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
    if (self.checkpoint is None) != (self.vocabulary is None):
      raise ValueError(
        "leakage_study.Model.checkpoint and vocabulary must be given together,"
        f" got checkpoint={self.checkpoint!r} and"
        f" vocabulary={self.vocabulary!r}"
      )


def build(model: Model, documents: Mapping[str, str]) -> rerankers.Reranker:
  """Builds a reranker.

  Args:
    model: its settings.
    documents: texts in which pieces are counted for their document frequency.

  Raises:
    ValueError: if a checkpoint or vocabulary cannot be read.
  """
  pieces = _vocabulary(model)
  params, config = t5_checkpoints.load(_checkpoint(model))
  if model.kind == "monoT5":
    return rerankers.MonoT5(
      vocabulary=pieces,
      config=config,
      start=params,
      length=model.query_length + model.document_length,
      query_length=model.query_length,
    )
  terms = rerankers.Terms(
    vocabulary=pieces,
    embeddings=params["token_embedder"]["embedding"],
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


def _checkpoint(model: Model) -> pathlib.Path:
  return pathlib.Path(model.checkpoint or shipped.DIRECTORY)


def _vocabulary(model: Model) -> Any:
  if model.vocabulary is not None:
    return vocabulary.load(model.vocabulary)
  return vocabulary.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def digest(model: Model) -> str:
  """Returns what the start of a training depends on, beside its settings."""
  path = model.vocabulary or shipped.VOCABULARY
  return artifacts.fingerprint(
    _fingerprints.of_checkpoint(_checkpoint(model)), _fingerprints.of_file(path)
  )


def note(model: Model) -> str:
  """Says in one sentence what a reader must know of a reranker."""
  place = "the small T5 of the package" if model.checkpoint is None else "a T5"
  what = "weights" if model.kind == "monoT5" else "vectors of pieces"
  recipe = model.recipe
  length = (
    f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
  )
  return (
    f"{model.name}: starts from the {what} of {place}; {length} in batches of"
    f" {recipe.batch_size // 2} instances, learning rate"
    f" {recipe.learning_rate:g}; reads {model.query_length} pieces of a query"
    f" and {model.document_length} of a document; repetitions: {model.seeds}."
  )
