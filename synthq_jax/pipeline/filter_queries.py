"""Drops synthetic queries that teach a retriever little; optional.

Three filters, each off by itself: queries that were cut at full length; queries
that are copied from their document; and round-trip consistency, which keeps a
query if a retriever that was trained on the synthetic queries themselves finds
the query's document among the first of the whole collection.

Formal guarantee:
  Post-processing. The stage is given synthetic queries, public documents, a
  public checkpoint and settings; from the checkpoint it trains a retriever of
  its own, on the very queries that it filters. It takes neither PreparedData,
  nor another retriever, nor the secret of the working directory, and opens no
  file under `private/`, unless that is where the queries are. So what it keeps
  has the statement of what it was given. A retriever that was trained on real
  queries, or on another release, would break this: its choice would tell about
  them.

References:
  Dai et al. 2022, Promptagator, section 3.2 (round trip).
  Alberti et al. 2019, Synthetic QA Corpora Generation with Roundtrip
  Consistency.
"""

import dataclasses
import json
import pathlib
import shutil
import time
from typing import NamedTuple

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import files
from synthq_jax.generation import filters
from synthq_jax.models import dual_encoder
from synthq_jax.pipeline import (
  _own_ranks,
  _queries,
  config_types,
  inputs,
  results,
  workspace,
)
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import bm25
from synthq_jax.training import pairs

__all__ = ["Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which filters run; without any, the stage is left out."""

  top_k: int | None = None
  """Keep queries whose document the retriever ranks among the first this many
  of the whole collection; None or 0: all."""
  steps: int | None = None
  """Of the retriever's training; None: those of train_retriever.Config, whose
  recipe it follows."""
  copied_share: float | None = None
  """Drop queries of which one run of words makes up at least this share and
  stands in their document, in (0, 1]; None: keep them."""
  copied_words: int = 6
  """Words that such a run has at least."""
  drop_truncated: bool = False
  """Drop queries that were cut at full length."""
  gauge_queries: int = 1000
  """Queries that BM25 is asked for the gauge, at most."""
  seed: int = 0
  """Queries of the gauge and of the examples; public."""
  batch_size: int = dataclasses.field(
    default=256, metadata={"speed_only": True}
  )
  """Rows encoded at once."""

  def __post_init__(self):
    config_types.at_least(self, 0, "top_k", "seed")
    config_types.at_least(
      self, 1, "steps", "copied_words", "gauge_queries", "batch_size"
    )
    config_types.positive(self, "copied_share")
    if self.copied_share is not None and self.copied_share > 1:
      raise ValueError(
        "filter_queries.Config.copied_share must be at most 1, got"
        f" {self.copied_share}"
      )

  @property
  def is_wanted(self) -> bool:
    """Whether any filter runs."""
    return bool(self.top_k or self.copied_share or self.drop_truncated)


def run(
  config: Config,
  folders: workspace.Folders,
  digest: str,
  *,
  documents: results.PublicDocuments,
  start_from: pathlib.Path,
  synthetic: results.SyntheticQueries,
  recipe: pairs.Recipe,
) -> results.SyntheticQueries:
  """Filters the queries of one generator, and measures what is left.

  Cheap filters come first: the retriever is trained on what they leave.

  Args:
    config: which filters.
    folders: the working directory.
    digest: fingerprint to save the result under.
    documents: the public collection.
    start_from: the public checkpoint.
    synthetic: what the generator wrote.
    recipe: of the retriever, for example `train_retriever.Config`; a dataclass.

  Returns:
    The kept queries, with all counts; under `private/` if the queries are.

  Raises:
    ValueError: if no query is left, or top_k is the whole collection.
  """
  start = time.monotonic()
  _check(config, documents)
  is_private = results.is_private_path(synthetic.directory)
  directory = (folders.private if is_private else folders.public)(
    f"filter_queries/{synthetic.name}"
  )
  corpus = inputs.corpus(folders, documents)
  ids, _ = inputs.document_tokens(folders, documents)
  written = _read(folders, ids, synthetic)
  first = _by_text(config, written, corpus)
  left = written.take(first.indices)
  ranks = None
  if config.top_k and left.texts:
    ranks = _ranks(
      config, folders, digest, documents, start_from, recipe, left, directory
    )
  found = None if ranks is None else ranks < config.top_k
  second = filters.keep(left.texts, left.documents, retrieved=found)
  now = filters.removed(first, second)
  kept = left.take(second.indices)
  if not kept.texts:
    raise ValueError(
      f"filter_queries.Config left none of the {len(written.texts)} queries of"
      f" {synthetic.name}, got {now}: take a larger top_k or copied_share, or"
      " train the retriever for longer"
    )
  _queries.save(
    directory, kept.names, kept.texts, kept.owners, ids, kept.tokens
  )
  _save_removed(directory, written, first, second, ranks)
  result = dataclasses.replace(
    synthetic,
    directory=folders.relative(directory),
    statement=statement_lib.inherit(synthetic.statement, _note(config)),
    removed={k: synthetic.removed.get(k, 0) + n for k, n in now.items()},
    filters=_in_words(config),
    **_queries.measured(
      kept.texts,
      kept.owners,
      index=bm25.BM25().build(
        [str(i) for i in ids], inputs.document_texts(corpus)
      ),
      corpus=corpus,
      seed=config.seed,
      gauge_queries=config.gauge_queries,
      num_examples=len(synthetic.examples),
    ),
    seconds=synthetic.seconds + time.monotonic() - start,
  )
  artifacts.save(directory, result, digest)
  shutil.rmtree(_state(directory, digest), ignore_errors=True)
  return result


def _check(config: Config, documents: results.PublicDocuments) -> None:
  if config.top_k and config.top_k >= documents.num_documents:
    raise ValueError(
      f"filter_queries.Config.top_k must be below {documents.num_documents},"
      f" the size of the collection, got {config.top_k}: it would keep all"
    )


class _Written(NamedTuple):
  """Synthetic queries in the order of their documents."""

  names: list[str]
  texts: list[str]
  documents: list[str]  # ids
  tokens: np.ndarray  # [query, length]
  owners: np.ndarray  # [query], positions of the documents, ascending

  def take(self, indices: np.ndarray) -> "_Written":
    lists = ([one[i] for i in indices] for one in self[:3])
    return _Written(*lists, self.tokens[indices], self.owners[indices])


def _read(folders, ids, synthetic) -> _Written:
  """Reads queries, and refuses files that do not belong together."""
  folder = folders.root / synthetic.directory
  lines = [line for _, line in files.json_lines(folder / "queries.jsonl")]
  stored = inputs.arrays(folders, synthetic, folder / "tokens.npz")
  owners = stored["documents"]
  named = [line["document"] for line in lines]
  if named != [str(i) for i in ids[owners]] or np.any(np.diff(owners) < 0):
    raise ValueError(
      f"{folder}: expected queries.jsonl and tokens.npz of the same queries, in"
      " the order of their documents, got others: delete this folder, and the"
      " queries are written again"
    )
  return _Written(
    names=[line["_id"] for line in lines],
    texts=[line["text"] for line in lines],
    documents=named,
    tokens=stored["tokens"],
    owners=owners,
  )


def _by_text(
  config: Config, written: _Written, corpus: pathlib.Path
) -> filters.Kept:
  """Drops what can be told from query and document alone."""
  copied = None
  if config.copied_share:
    copied = filters.are_copies(
      written.texts,
      _queries.texts_of(corpus, written.owners),
      share=config.copied_share,
      min_words=config.copied_words,
    )
  ended = filters.has_ended(written.tokens) if config.drop_truncated else None
  return filters.keep(
    written.texts, written.documents, ended=ended, copied=copied
  )


def _ranks(
  config, folders, digest, documents, start_from, recipe, left, directory
) -> np.ndarray:
  """Trains a retriever on the queries and ranks their own documents with it."""
  state = _state(directory, digest)
  description = f"filter_queries {directory.name}"
  stored = {"tokens": left.tokens, "documents": left.owners}
  params, model_config = inputs.load_public(start_from, documents)
  params = pairs.train(
    dataclasses.replace(recipe, steps=config.steps or recipe.steps),
    dual_encoder.encoder_params(params),
    model_config,
    inputs.with_documents(folders, documents, stored),
    directory=state / "training",
    metrics_path=directory / f"metrics_{digest}.jsonl",
    description=description,
  )
  return _own_ranks.of(
    params,
    model_config,
    left.tokens,
    inputs.document_tokens(folders, documents)[1],
    left.owners,
    directory=state,
    description=description,
    batch_size=config.batch_size,
    progress=recipe.settings.progress,
  )


def _state(directory: pathlib.Path, digest: str) -> pathlib.Path:
  """Where unfinished work lies: beside the queries, not below `private/`."""
  return directory / f"state_{digest}"


def _save_removed(directory, written, first, second, ranks) -> None:
  """Writes what went, for people to read: as private as what stayed."""
  judged = {} if ranks is None else dict(zip(first.indices, ranks, strict=True))
  kept = set(first.indices[second.indices])
  lines = [
    {
      "_id": name,
      "text": written.texts[i],
      "document": written.documents[i],
      "rank": int(judged[i]) if i in judged else None,
    }
    for i, name in enumerate(written.names)
    if i not in kept
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  artifacts.write_atomically(directory / "removed.jsonl", text)


def _note(config: Config) -> str:
  """What happened to the queries, for their statement."""
  if not config.top_k:
    return "They were filtered by public rules: post-processing."
  return (
    "They were filtered by public rules and by a retriever that was trained,"
    " from the public checkpoint, on these synthetic queries alone:"
    " post-processing."
  )


def _in_words(config: Config) -> str:
  """What the filters did, for the reports."""
  done = []
  if config.drop_truncated:
    done.append("queries cut at full length")
  if config.copied_share:
    done.append(
      f"queries of which a run of {config.copied_words} words or more, and at"
      f" least the share {config.copied_share:g} of the query, stands in their"
      " document"
    )
  if config.top_k:
    done.append(
      "queries whose document a retriever trained on all the others does not"
      f" rank among the first {config.top_k} of the collection"
    )
  return f"Dropped were {'; '.join(done)}."
