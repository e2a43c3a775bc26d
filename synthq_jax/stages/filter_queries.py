"""Drops synthetic queries that teach a retriever little, if `top_k` is set.

The filter is round-trip consistency: a query is kept if its document is found
among the first of the whole collection. BM25 searches, or a retriever that was
trained on the synthetic queries themselves.

Formal guarantee:
  Post-processing. The stage receives synthetic queries, public documents, a
  public checkpoint and settings. From the checkpoint it may train a retriever
  of its own, on the very queries that it filters. It takes neither
  PreparedData, nor another retriever, nor the secret of the working directory,
  and opens no file under `private/`, unless the queries are there. So the kept
  queries have the statement of the input queries. A retriever that was trained
  on real queries, or on another release, would break this: its choice would
  tell about them.

References:
  Dai et al. 2022, Promptagator, section 3.2 (round trip).
  Alberti et al. 2019, Synthetic QA Corpora Generation with Roundtrip
  Consistency.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from synthq_jax.data import blocks, files, passages
from synthq_jax.generation import filters, text_measures
from synthq_jax.models import encoders, t5_checkpoints
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import encode, ranks, vector_files
from synthq_jax.runtime import (
  config_types,
  encoder_start,
  inputs,
  results,
  rows,
  runner,
  stage,
  training_pairs,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import loop, pairs
from synthq_jax.training import progress as progress_lib

__all__ = ["STAGE", "Config", "Inputs", "own_ranks", "run"]

_RANKERS = ("retriever", "bm25")
_PART = 8192
"""Rows between two saves: a kill costs one part, and memory holds two parts at
a time whatever the size of the collection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(queries_lib.Config):
  """Settings of the filter; without it, the stage is left out."""

  GONE: ClassVar[Mapping[str, Any]] = {
    "copied_share": None, "copied_words": 6, "drop_truncated": False,
  }  # fmt: skip

  top_k: int | None = None
  """Rank within which the own document must be: keep queries whose document is
  ranked among the first this many of the whole collection. None or 0: keep
  all."""
  ranker: str = "retriever"
  """Ranker of documents: "bm25", or a "retriever" that is trained on the
  queries."""
  steps: int | None = None
  """Optimizer steps of the retriever; None: those of train_retriever.Config,
  whose recipe it follows."""

  def __post_init__(self):
    super().__post_init__()
    config_types.at_least(self, 0, "top_k")
    config_types.at_least(self, 1, "steps")
    config_types.one_of(self, "ranker", _RANKERS)

  @property
  def is_wanted(self) -> bool:
    """Whether the filter runs."""
    return bool(self.top_k)

  @property
  def trains(self) -> bool:
    """Whether a retriever is trained to rank."""
    return bool(self.top_k) and self.ranker != "bm25"


def get_needs(config) -> tuple[str, ...]:
  """Returns the stages that it reads; no encoder if BM25 ranks."""
  others = tuple(name for name in STAGE.needs if name != "static_encoder")
  return STAGE.needs if config.filter_queries.trains else others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Queries to filter, and the start of a retriever that ranks."""

  documents: results.PublicDocuments
  encoder: encoder_start.EncoderStart
  synthetic: results.SyntheticQueries  # all queries of the generator
  recipe: pairs.Recipe  # of the retriever


def plan_rows(plan: rows.Plan) -> dict[str, rows.Row]:
  """Plans the filtering of each set of queries, if the filter is set."""
  written = plan.written if plan.config.filter_queries.is_wanted else ()
  return {row.queries: row for row in written}


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the filtering of one set of queries."""
  settings, recipe = run.config.filter_queries, run.config.train_retriever
  data = run.encoder_data if settings.trains else run.data
  written = run.get_results("generate")[row]
  return stage.Job(
    row=row,
    depends=(settings, recipe, *data, written.digest),
    settings=settings,
    inputs=Inputs(
      documents=run.documents,
      encoder=run.encoder,
      synthetic=written.value,
      recipe=recipe,
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses a retriever's checkpoint with another vocabulary."""
  encoder = run.encoder
  if run.config.encoder.folder and not encoder.has_tokenizer:
    run.check_vocabulary(pathlib.Path(encoder.folder))


class _Written(NamedTuple):
  """Synthetic queries in the order of their documents."""

  names: list[str]
  texts: list[str]
  documents: list[str]  # ids
  tokens: np.ndarray  # [query, length]
  owners: np.ndarray  # [query], positions of the documents, ascending
  passages: np.ndarray  # [query], positions of their passages

  def take(self, indices: np.ndarray) -> "_Written":
    """Returns the queries at these positions."""
    return _Written(
      names=[self.names[i] for i in indices],
      texts=[self.texts[i] for i in indices],
      documents=[self.documents[i] for i in indices],
      tokens=self.tokens[indices],
      owners=self.owners[indices],
      passages=self.passages[indices],
    )


def _read_written(
  folders: workspace.Folders, ids: Any, synthetic: results.SyntheticQueries
) -> _Written:
  """Reads one set of queries; refuses two files of different queries."""
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
    passages=stored["passages"],
  )


def run(task: stage.Task[Config, Inputs]) -> results.SyntheticQueries:
  """Filters the queries of one generator, and measures the rest.

  Returns:
    The kept queries, with all counts; under `private/` if the queries are.

  Raises:
    ValueError: if no query is left, or top_k is at least the size of the
      collection.
  """
  config, folders = task.settings, task.folders
  documents, synthetic = task.inputs.documents, task.inputs.synthetic
  assert config.top_k  # as planned
  if config.top_k >= documents.num_documents:
    raise ValueError(
      f"filter_queries.Config.top_k must be below {documents.num_documents},"
      f" the size of the collection, got {config.top_k}: it would keep all"
    )
  directory = task.folder(private=results.is_private_path(synthetic.directory))
  state = directory / f"state_{task.digest}"  # not below `private/`
  corpus = inputs.corpus(folders, documents)
  ids = inputs.document_tokens(folders, documents).ids
  index = functools.cache(  # built late: not in memory while a retriever trains
    lambda: queries_lib.index_of(ids, corpus)
  )
  written = _read_written(folders, ids, synthetic)
  is_found, ranked = None, None
  if config.ranker == "bm25":
    is_found = text_measures.own_document_gauge(
      written.texts, written.documents, index(), k=config.top_k
    )
  else:
    ranked = _compute_ranks(task, written, directory, state)
  passed = filters.keep(
    written.texts,
    written.documents,
    answerable=is_found,
    retrieved=None if ranked is None else ranked < config.top_k,
  )
  counts = filters.removed(passed)
  if not len(passed.indices):
    raise ValueError(
      f"filter_queries.Config left none of the {len(written.texts)} queries of"
      f" {synthetic.name}, got {counts}: take a larger top_k, or train the"
      " retriever for longer"
    )
  remaining = written.take(passed.indices)
  _save_removed(directory, written, passed.indices, ranked)
  queries_lib.save(
    directory,
    remaining.names,
    remaining.texts,
    remaining.owners,
    ids,
    remaining.tokens,
    remaining.passages,
  )
  return dataclasses.replace(
    synthetic,
    directory=folders.relative(directory),
    statement=statement_lib.inherit(synthetic.statement, _write_note(config)),
    removed={k: synthetic.removed.get(k, 0) + n for k, n in counts.items()},
    filters=_describe(config),
    **queries_lib.measure(
      remaining.texts,
      remaining.owners,
      index=index(),
      corpus=corpus,
      config=config,
      num_examples=len(synthetic.examples),
    ),
  )


def _compute_ranks(
  task: stage.Task[Config, Inputs], left: _Written, directory, state
) -> np.ndarray:
  """Trains a retriever on the queries and ranks their own documents with it."""
  config, folders, recipe = task.settings, task.folders, task.inputs.recipe
  documents = task.inputs.documents
  description = f"filter_queries {directory.name}"
  stored = training_pairs.Stored(
    queries=left.texts,
    tokens=left.tokens,
    documents=left.owners,
    passages=left.passages,
  )
  encoder = task.inputs.encoder
  tokens = encoder.tokens()
  params, model_config = encoder.load_public(documents)
  params = pairs.train(
    dataclasses.replace(recipe, steps=config.steps or recipe.steps),
    encoders.of(model_config).select(params),
    model_config,
    training_pairs.pair_with_documents(folders, documents, stored, tokens),
    loop.Files(
      directory=state / "training",
      metrics_path=directory / f"metrics_{task.digest}.jsonl",
      description=description,
    ),
  )
  return own_ranks(
    params,
    model_config,
    encoder_start.query_tokens(tokens, left.texts, left.tokens),
    encoder_start.open_passages(folders, documents, tokens).tokens,
    left.passages,
    directory=state,
    description=description,
    batch_size=config.batch_size,
  )


def _save_removed(directory, written, remaining, ranks) -> None:
  """Writes the removed queries for people to read; as private as the kept
  ones."""
  remaining = set(remaining.tolist())
  lines = [
    {
      "_id": name,
      "text": written.texts[i],
      "document": written.documents[i],
      "rank": None if ranks is None else int(ranks[i]),
    }
    for i, name in enumerate(written.names)
    if i not in remaining
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  artifacts.write_atomically(directory / "removed.jsonl", text)


def _write_note(config: Config) -> str:
  """Returns a sentence on the filters for the statement of the queries."""
  means = "public rules"
  if config.trains:
    means += (
      " and by a retriever that was trained, from a public encoder, on these"
      " synthetic queries alone"
    )
  return f"They were filtered by {means}: post-processing."


def _describe(config: Config) -> str:
  """Returns a sentence on the filter for the reports."""
  who = {"bm25": "BM25", "retriever": "a retriever trained on all the others"}
  return (
    f"Dropped were queries whose document {who[config.ranker]} does not rank among"
    f" the first {config.top_k} of the collection."
  )


def own_ranks(
  params: Any,
  model_config: t5_checkpoints.Shape,
  queries: Int[np.ndarray, "query length"],
  documents: passages.Tokens,
  owners: Int[np.ndarray, " query"],
  *,
  directory: pathlib.Path,
  description: str,
  batch_size: int,
) -> Int[np.ndarray, " query"]:
  """Counts the documents that the encoder scores above each query's own.

  Vectors and ranks are written to disk part by part, and read from there again.

  Args:
    params: parameters of the encoder.
    model_config: its shape.
    queries: tokens of the queries.
    documents: tokens of the whole collection.
    owners: the position of each query's own document.
    directory: folder of the parts, for this encoder and these queries.
    description: text before the progress bars.
    batch_size: rows encoded at once.

  Returns:
    Ranks, 0 for the best; equal scores share the best rank among them.
  """
  opened = []
  for kind, tokens in (("documents", documents), ("queries", queries)):
    title, folder = f"{description}: {kind}", directory / kind
    with progress_lib.bar(title, len(tokens)) as bar:
      encode.to_files(
        params,
        model_config,
        tokens,
        folder,
        block_rows=_PART,
        batch_size=batch_size,
        progress=bar.update,
      )
    opened.append(vector_files.open_vectors(folder, len(tokens)))
  collection, query_vectors = opened
  stored, all_ranks = blocks.Blocks(directory / "ranks"), []
  with progress_lib.bar(f"{description}: ranks", len(queries)) as bar:
    for first in range(0, len(queries), _PART):
      part = slice(first, first + _PART)
      better = stored.read(first)
      if better is None:
        scores = ranks.own_scores(query_vectors[part], collection[owners[part]])
        counts = [
          ranks.count_better(query_vectors[part], scores, block)
          for block in collection.blocks
        ]
        better = np.sum(counts, axis=0)
        stored.write(first, better)
      all_ranks.append(better)
      bar.update(len(owners[part]))
  return np.concatenate(all_ranks)


STAGE = stage.Stage(
  name="filter_queries",
  result=results.SyntheticQueries,
  config=Config,
  check=check,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("generate", "static_encoder"),
  starts_from="encoder",
  narrowed=get_needs,
)
