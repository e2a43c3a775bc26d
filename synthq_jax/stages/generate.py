"""Writes synthetic queries for documents of the whole public collection.

Formal guarantee:
  Post-processing: the documents, the number of queries of each and the filters
  depend on the public collection, the settings and the generator alone, never
  on clicks. So the queries carry the generator's statement unchanged. The stage
  receives the public documents and neither PreparedData nor the secret. With
  `prepare_data.Config.written_for="train"` the documents that train queries ask
  about are public, and queries are written for them alone. These documents are
  not protected: the statement says so, and holds for the texts of the queries.
"""

import dataclasses
import functools
import pathlib

import jax
import numpy as np

from synthq_jax import field_kinds
from synthq_jax.data import blocks
from synthq_jax.data import passages as passages_lib
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.generation import decoding, filters
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import (
  config_types,
  model_files,
  prepared_files,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.stages import _encoded
from synthq_jax.storage import array_files
from synthq_jax.training import distributed
from synthq_jax.training import progress as progress_lib

__all__ = ["STAGE", "Config", "Inputs", "run"]

_PART = 2048
"""Documents between two saves: under a minute on two cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(queries_lib.Config):
  """Settings of the choice of documents, and of sampling their queries."""

  num_documents: int | None = None
  """Number of documents, drawn from the whole public collection, or from those
  that `prepare_data.Config.written_for` names; None: all."""
  queries_per_document: int = 1
  """Queries of each document, or of each passage if it has several."""
  prefix: str = "generate_query: "
  """Text before each document, as in fine-tuning."""
  p: float = 0.8
  """Nucleus mass: tokens are drawn from the most probable ones of total mass
  p."""
  temperature: float = 1.0
  """Divisor of the logits, applied before the nucleus."""
  max_length: int = 24
  """Tokens of a query, EOS included."""
  num_examples: int = 30
  """(query, document) pairs that the result holds for people to read."""
  batch_size: int = field_kinds.speed_only(128)
  """Documents in one batch of decoding."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "p", "temperature")
    config_types.at_least(
      self, 1, "num_documents", "queries_per_document", "max_length"
    )
    config_types.at_least(self, 0, "num_examples")
    if self.p > 1:
      raise ValueError(f"generate.Config.p must be at most 1, got {self.p}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Generator, and the documents that it writes for."""

  documents: results.PublicDocuments
  start: pathlib.Path  # the folder of the public checkpoint
  generator: results.Checkpoint | None
  """Fine-tuned generator; None: the public checkpoint writes, before any
  private step."""


def make_job(run: runner.Run, row: rows.Row) -> stage.Job[Inputs]:
  """Returns the writing of one set of queries."""
  settings, generator = run.config.generate, run.generators.get(row)
  return stage.Job(
    row=row,
    depends=(
      settings, *run.data, generator.digest if generator else "public"
    ),
    settings=settings,
    inputs=Inputs(
      documents=run.documents,
      start=run.start,
      generator=generator.value if generator else None,
    ),
  )  # fmt: skip


def check(run: runner.Run) -> None:
  """Refuses to write for more documents than there are."""
  prepared, number = run.prepared, run.config.generate.num_documents
  available, description = prepared.num_documents, "the size of the collection"
  if prepared.num_asked:
    available, description = (
      prepared.num_asked,
      "those that train queries ask about",
    )
  if number is not None and number > available:
    raise ValueError(
      f"generate.Config.num_documents must be at most {available:,}, {description}, got"
      f" {number:,}: set a smaller NUM_DOCUMENTS, or None"
    )


def run(task: stage.Task[Config, Inputs]) -> results.SyntheticQueries | None:
  """Generates, filters and measures queries.

  Each of several processes samples its share of the parts; process 0 does the
  rest.

  Returns:
    The queries, under `private/` if the generator is not private; None in
    processes other than 0.
  """
  config, space, name = task.settings, task.folders, task.get_row().queries
  documents, generator = task.inputs.documents, task.inputs.generator
  passages = prepared_files.document_tokens(space, documents)
  passages = passages.cut_at(documents.document_length)
  ids = passages.ids
  corpus = prepared_files.corpus(space, documents)
  chosen = _choose(config, space, documents)
  read = np.flatnonzero(np.isin(passages.owners, chosen))
  read = _drop_empty(passages, read)
  samples = config.queries_per_document
  vocabulary = prepared_files.vocabulary(space, documents)
  directory = task.folder(
    private=generator is not None
    and results.is_private_path(generator.directory)
  )
  source = task.inputs.start
  if generator is None:
    model_files.refuse_private(source)
  else:
    source = space.root / generator.directory
  parts = blocks.Blocks(directory / f"parts_{task.digest}")
  write = functools.partial(
    _write, config, source, passages, read, samples, vocabulary, name, parts
  )
  firsts = range(0, len(read), _PART)
  write(firsts[distributed.index() :: distributed.count()])
  distributed.barrier(f"generate {name}")
  if not distributed.is_main():
    return None
  written = _read(config, parts, firsts, write)
  read = np.repeat(read, samples)
  owners = passages.owners[read]
  texts = [queries_lib.decode(vocabulary, row) for row in written]
  filtered = filters.keep(texts, [str(ids[owner]) for owner in owners])
  if not len(filtered.indices):
    raise ValueError(
      f"generate: expected queries of {name}, got none of {len(texts)} texts,"
      f" {filtered.removed}: train the generator for less long or with a larger"
      " EPSILON, or leave its row out"
    )
  queries = [texts[i] for i in filtered.indices]
  owners = owners[filtered.indices]
  names = [f"s{i}" for i in range(len(queries))]
  queries_lib.save(
    directory,
    names,
    queries,
    owners,
    ids,
    written[filtered.indices],
    read[filtered.indices],
  )
  return results.SyntheticQueries(
    directory=space.relative(directory),
    row=task.get_row(),
    statement=_statement(generator, documents),
    prefix=config.prefix,
    sampler=f"nucleus p={config.p}, temperature {config.temperature},"
    f" at most {config.max_length} tokens, seed {config.seed}",
    decoding={
      "p": config.p,
      "temperature": config.temperature,
      "max_length": config.max_length,
    },
    num_documents=len(np.unique(passages.owners[read])),
    queries_per_document=config.queries_per_document,
    removed=filtered.removed,
    **queries_lib.measure(
      queries,
      owners,
      index=queries_lib.index_of(ids, corpus),
      corpus=corpus,
      config=config,
      num_examples=config.num_examples,
    ),
  )


def _drop_empty(
  passages: passages_lib.Passages, rows: np.ndarray
) -> np.ndarray:
  """Returns the passages that hold a token besides the end of text."""
  parts = np.split(rows, range(_PART, len(rows), _PART))
  remaining = [
    part[(passages.tokens[part] != vocabulary_lib.PAD_ID).sum(axis=1) > 1]
    for part in parts
  ]
  return np.concatenate(remaining)


def _choose(
  config: Config,
  folders: workspace.Folders,
  documents: results.PublicDocuments,
) -> np.ndarray:
  """Draws documents without looking at clicks, unless their list is public."""
  pool = np.arange(documents.num_documents)
  if documents.num_asked:
    pool = array_files.read(
      folders.root / documents.directory / results.ASKED_NAME
    )
  rng = np.random.default_rng([config.seed, 2])
  return np.sort(rng.permutation(pool)[: config.num_documents])


def _write(
  config, source, passages, chosen, samples, vocabulary, name, parts, firsts
) -> None:
  params, shape = t5_checkpoints.load(source, token_ids=vocabulary.token_ids)
  model_config = t5_config.require(shape, source)
  sampler = decoding.Nucleus(p=config.p, temperature=config.temperature)
  encoded_documents = _encoded.encode_collection(
    t5_checkpoints.flatten(params),
    model_config,
    passages,
    vocabulary,
    prefix=config.prefix,
    number=len(chosen),
  )
  total = sum(len(chosen[first : first + _PART]) for first in firsts)
  with progress_lib.bar(f"generate {name}", total, unit="doc") as bar:
    for first in firsts:
      part = chosen[first : first + _PART]
      if parts.read(first) is not None:
        bar.update(len(part))
      else:
        read = prepared_files.add_prefix(
          passages.tokens[part], vocabulary, config.prefix
        )
        rows = decoding.generate(
          params,
          model_config,
          read,
          ids=_name_passages(passages, part),
          key=jax.random.key(config.seed),
          sampler=sampler,
          max_length=config.max_length,
          num_samples=samples,
          forbidden=queries_lib.get_forbidden_ids(
            vocabulary, model_config.vocab_size
          ),
          batch_size=config.batch_size,
          devices=distributed.own_devices(),
          progress=bar.update,
          encoded=None
          if encoded_documents is None
          else encoded_documents.rows(part),
        )
        parts.write(first, rows)


def _name_passages(
  passages: passages_lib.Passages, rows: np.ndarray
) -> list[str]:
  """Names passages for their draws: documents by their ids alone."""
  owners = passages.owners[rows]
  numbers = rows - passages.of(owners)[0]
  return [
    f"{passages.ids[owner]} {number}" if number else str(passages.ids[owner])
    for owner, number in zip(owners, numbers, strict=True)
  ]


def _read(config: Config, parts, firsts, write) -> np.ndarray:
  """Returns all token rows, [passage * queries_per_document, max_length]."""
  missing = [first for first in firsts if parts.read(first) is None]
  if missing:  # parts damaged after another process wrote them
    write(missing)
  rows = [parts.read(first) for first in firsts]
  return np.concatenate(
    [part_rows.reshape(-1, config.max_length) for part_rows in rows]
  )


def _statement(
  generator: results.Checkpoint | None,
  documents: results.PublicDocuments,
):
  if generator is None:
    return documents.statement()
  chosen = (
    "the documents that train queries ask about, whose list is public"
    if documents.num_asked
    else "public documents chosen without looking at private records"
  )
  return statement_lib.inherit(
    generator.statement,
    f"Queries were sampled for {chosen}, the same number for each, and filtered"
    " by public rules: post-processing.",
  )


STAGE = stage.Stage(
  name="generate",
  result=results.SyntheticQueries,
  config=Config,
  check=check,
  plan=lambda plan: {row.queries: row for row in plan.written},
  job=make_job,
  run=run,
  needs=("finetune_dp",),
  starts_from="checkpoint",
  together=True,
)
