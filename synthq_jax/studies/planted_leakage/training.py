"""Builds and trains the rerankers of the study, and reranks the candidates."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from synthq_jax.data import shipped
from synthq_jax.leakage import rerankers, splits
from synthq_jax.leakage.rerankers import mono
from synthq_jax.leakage.rerankers import terms as terms_lib
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.retrieval import measures, trec
from synthq_jax.runtime import fingerprints
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame
from synthq_jax.studies.planted_leakage import data as data_lib

__all__ = [
  "BERT",
  "KINDS",
  "RUN",
  "Training",
  "build",
  "compute_digest",
  "get_folder",
  "list_jobs",
  "describe",
]

BERT = "monoBERT"
"""Kind of reranker that may start from a Hugging Face BERT."""

_TERM_RERANKERS = {
  "Duet": rerankers.Duet,
  "KNRM": rerankers.KNRM,
  "PACRR": rerankers.PACRR,
}

KINDS = ("monoT5", BERT, *_TERM_RERANKERS)
"""Kinds of rerankers that `build` accepts."""

RUN = "run.txt"
"""File of a training's run: candidates, and leaked documents that BM25 missed."""

_WORDS = frame.load_words("planted_leakage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One reranker, trained once on one set, with its scores."""

  model: str
  """Name of the reranker in tables."""
  leakage: str
  """Kind of training set, one of `splits.NAMES`."""
  size: int
  """Instances of the training set."""
  seed: int
  """Seed of the training set and of the training."""
  manifest: splits.Manifest
  """Manifest of the training set."""
  measures: dict[str, dict[str, float]]
  """Measure -> test query -> value."""
  num_parameters: int
  """Number of parameters, vectors of terms that stay fixed included."""
  steps: int
  """Number of optimizer steps."""
  loss: float
  """Training loss in the last line of the log, a mean over its steps."""
  train_seconds: float
  """Seconds of training in the run that finished it, compiling included."""
  rerank_seconds: float
  """Seconds of reranking, compiling included."""


def get_folder(
  root: pathlib.Path, model: str, leakage: str, size: int, seed: int
) -> pathlib.Path:
  """Returns the folder of a training."""
  kind = leakage.replace(" ", "_")
  return root / "trainings" / model / f"{kind}_{size}_seed{seed}"


def list_jobs(task: frame.Task, data: data_lib.Data) -> list[frame.Job]:
  """Lists the trainings of every reranker, seed, size and kind of leakage."""
  # One object for all trainings of a reranker, so programs are compiled once.
  reranker = functools.lru_cache(maxsize=1)(
    lambda model: build(model, data.documents)
  )
  listed = []
  for model in task.config.models:
    start = compute_digest(model)
    for seed in range(model.seeds):
      for size in task.config.sizes:
        for leakage in splits.NAMES:
          trainer = _Trainer(task, data, model, reranker, leakage, size, seed)
          listed.append(trainer.job(start))
  return listed


@dataclasses.dataclass(frozen=True)
class _Trainer:
  """Trains one reranker with one kind of leakage, size and seed."""

  task: frame.Task
  data: data_lib.Data
  model: Any
  reranker: Callable[[Any], rerankers.Reranker]
  leakage: str
  size: int
  seed: int

  def job(self, start: str) -> frame.Job:
    """Returns the training as a job; `start` is `compute_digest` of its model."""
    config = self.task.config
    directory = get_folder(
      self.task.root, self.model.name, self.leakage, self.size, self.seed
    )
    digest = artifacts.fingerprint(
      "planted_leakage 2",
      dataclasses.replace(self.model, seeds=1),
      start,
      self.leakage,
      self.size,
      self.seed,
      config.num_leaked,
      config.depth,
      list(config.measures),
      self.data.digest,
      fingerprints.versions(),
    )
    state = directory / f"state_{digest}"
    return frame.Job(
      directory=directory,
      kind=Training,
      digest=digest,
      make=lambda: self._make(state),
      state=state,
    )

  def _make(self, state: pathlib.Path) -> Training:
    data, config = self.data, self.task.config
    for other in set(state.parent.glob("state_*")) - {state}:
      artifacts.remove(other)  # unfinished training with other settings
    triples = data.triples(self.leakage, self.size, self.seed)
    texts = data.documents
    reranker = self.reranker(self.model)
    began = time.monotonic()
    params = rerankers.train(
      reranker,
      [
        (each.query, texts[each.relevant_id], texts[each.non_relevant_id])
        for each in triples
      ],
      recipe=self.model.recipe,
      seed=self.seed,
      directory=state,
    )
    trained = time.monotonic()
    ranked = data.ranked(self.seed)
    run = rerankers.rerank(reranker, params, ranked, data.queries, texts)
    trec.write_run(state.parent / RUN, run)
    # Score the file, not the run: its scores are strictly descending.
    run = {
      query: {id_: run[id_] for id_ in data.candidates[query]}
      for query, run in trec.read_run(state.parent / RUN).items()
    }
    evaluation = measures.evaluate(
      data.qrels, run, config.measures, drop_identical=False
    )
    lines = (state / "metrics.jsonl").read_text().splitlines()
    return Training(
      model=self.model.name,
      leakage=self.leakage,
      size=self.size,
      seed=self.seed,
      manifest=splits.make_manifest(
        self.leakage, triples, texts, seed=self.seed
      ),
      measures=evaluation.per_query,
      num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
      steps=self.model.recipe.num_steps(self.size // 2),
      loss=float(json.loads(lines[-1])["loss"]) if lines else float("nan"),
      train_seconds=trained - began,
      rerank_seconds=time.monotonic() - trained,
    )


def build(model: Any, documents: Mapping[str, str]) -> rerankers.Reranker:
  """Builds an untrained reranker.

  monoT5 starts from all parameters of the T5, a BERT of a folder from none, the
  others from its embeddings of pieces.

  Args:
    model: a `planted_leakage.Model`.
    documents: document id -> text, for the document frequencies of pieces.

  Raises:
    ValueError: if a checkpoint or vocabulary cannot be read, or monoT5 is given
      no T5.
  """
  pieces = shipped.vocabulary(model.vocabulary)
  lengths = {
    "length": model.query_length + model.document_length,
    "query_length": model.query_length,
  }
  if bert := _get_bert_folder(model):
    return mono.bert_from_folder(bert, **lengths)
  params, config = t5_checkpoints.load(
    model.checkpoint or shipped.DIRECTORY, token_ids=pieces.token_ids
  )
  vectors = params["token_embedder"]["embedding"]
  if model.kind == BERT:
    return mono.bert_from_sentencepiece(pieces, embeddings=vectors, **lengths)
  if model.kind == "monoT5":
    if not isinstance(config, t5_config.T5Config):
      raise ValueError(
        "expected a T5 to start monoT5 from, got static vectors: give a T5, or"
        " choose another kind"
      )
    return rerankers.MonoT5(
      vocabulary=pieces, config=config, start=params, **lengths
    )
  return _TERM_RERANKERS[model.kind](
    vocabulary=pieces,
    embeddings=vectors,
    query_length=model.query_length,
    document_length=model.document_length,
    idf=terms_lib.inverse_document_frequencies(pieces, documents.values()),
  )


def _get_bert_folder(model: Any) -> str | None:
  """Returns the folder of the BERT that a model starts from, or None."""
  return model.checkpoint if model.kind == BERT else None


def compute_digest(model: Any) -> str:
  """Returns a fingerprint of the checkpoint and vocabulary a model starts from."""
  if bert := _get_bert_folder(model):
    return fingerprints.of_folder(bert)
  path = pathlib.Path(model.checkpoint or shipped.DIRECTORY)
  return artifacts.fingerprint(
    fingerprints.of_checkpoint(path),
    fingerprints.of_file(model.vocabulary or shipped.VOCABULARY),
  )


def describe(model: Any) -> str:
  """Describes a reranker and its training in a sentence for readers."""
  recipe = model.recipe
  length = (
    f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
  )
  has_checkpoint = model.checkpoint is not None
  start = "t5" if model.kind == "monoT5" else "vectors"
  if model.kind == BERT:
    start = "bert" if has_checkpoint else "new_bert"
  whose = "a given T5" if has_checkpoint else "the package's small T5"
  return _WORDS.text(
    "reranker",
    model=model,
    start=_WORDS.text(start, whose=whose),
    length=length,
    instances=recipe.batch_size,
  )
