"""Deals passages and questions to clients, as texts and as tokens."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from synthq_jax.data import beir, newsqa, shipped, sources, wordpiece
from synthq_jax.federated import clients as clients_lib
from synthq_jax.federated import partitions, passages
from synthq_jax.runtime import fingerprints
from synthq_jax.storage import artifacts

__all__ = [
  "PARTITIONS",
  "TRAIN",
  "ClientFacts",
  "Data",
  "Facts",
  "build",
  "thinned",
]

PARTITIONS = ("client", "genre", "dirichlet", "iid")
"""How passages become clients'."""

TRAIN = clients_lib.TRAIN

_SETTINGS = (  # that the data depends on beside its source, in their order
  "partition", "sentences_of", "num_clients", "alpha", "partition_seed",
  "test_split", "max_train_questions", "min_test_questions", "max_clients",
  "max_sentences", "query_length", "sentence_length",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientFacts:
  """Counts of one client; as private as its texts."""

  name: str
  num_passages: int
  num_sentences: int
  num_train: int
  """Questions that are trained on."""
  num_test: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data."""

  source: str
  partition: str
  num_left_out: int
  """Clients with too few questions."""
  num_foreign_judgements: int
  """Judgements of another client's passage, left out."""
  num_lost_questions: int
  """Questions that nothing of their client answers."""
  clients: tuple[ClientFacts, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """All clients, in one order."""

  clients: tuple[clients_lib.Client, ...] = dataclasses.field(repr=False)
  tokens: tuple[clients_lib.Tokens, ...] = dataclasses.field(repr=False)
  facts: Facts
  digest: str
  """Of everything above and of the settings that made it."""


def build(config: Any) -> Data:
  """Reads the source, deals passages and questions to clients, tokenizes.

  Args:
    config: a `federated.Config`.

  Raises:
    ValueError: if the source cannot be read, or a client that is left has no
      questions to train or to test on.
  """
  judged, source = _read(config)
  splits = [TRAIN, config.test_split]
  if config.is_chosen:
    splits.append(config.dev_split)
  for split in splits:
    if split not in judged.splits():
      raise ValueError(
        f"federated.Config: expected a split {split!r} in"
        f" {config.source}, got {', '.join(judged.splits()) or 'none'}"
      )
  federation = clients_lib.build(_dealt(config, judged))
  kept = [
    client
    for client in federation.clients
    if len(client.splits[TRAIN])
    and len(client.splits[config.test_split]) >= config.min_test_questions
  ]
  if len(kept) < 2:
    raise ValueError(
      f"federated.Config: expected two clients or more with {TRAIN}"
      " questions and at least"
      f" {config.min_test_questions} {config.test_split} questions, got"
      f" {len(kept)} of {len(federation.clients)}: change the partition, the"
      " splits or min_test_questions"
    )
  kept = tuple(_cut(client, config) for client in _largest(kept, config))
  words = config.vocabulary or shipped.VOCABULARY
  pieces = shipped.vocabulary(config.vocabulary)
  if config.bert is not None:
    pieces, words = wordpiece.load(config.bert), pathlib.Path(config.bert)
    words = next(
      words / name
      for name in ("tokenizer.json", "vocab.txt")
      if (words / name).is_file()
    )
  return Data(
    clients=kept,
    tokens=tuple(
      clients_lib.tokenize(
        client,
        pieces,
        query_length=config.query_length,
        sentence_length=config.sentence_length,
      )
      for client in kept
    ),
    facts=_facts(config, federation, kept),
    digest=artifacts.fingerprint(
      source,
      fingerprints.of_file(words),
      *(getattr(config, name) for name in _SETTINGS),
      *([config.dev_split] if config.is_chosen else []),
      *map(fingerprints.of_file, config.urls),
      fingerprints.versions(),
    ),
  )


def _read(config: Any) -> tuple[passages.JudgedPassages, str]:
  """Returns the passages, and a digest of where they come from."""
  source = sources.open(config.source, "federated.Config.source")
  if source.kind == "newsqa":  # its answers are spans of the text
    stories = newsqa.from_place(source.place)
    return passages.from_stories(stories), source.digest()
  setting = "federated.Config.sentences_of"
  if config.sentences_of is not None and source.kind != "beir":
    raise ValueError(
      f"{setting} must be None for a source without corpus.jsonl, got"
      f" {config.sentences_of!r} beside {config.source}: take a beir:FOLDER"
    )
  collection, digest = source.read(), source.digest()
  if config.sentences_of is None:
    return (
      passages.from_documents(collection, max_sentences=config.max_sentences),
      digest,
    )
  owner = beir.read_key(source.place, config.sentences_of)
  if not owner:
    raise ValueError(
      f"{setting} must be a key of corpus.jsonl's lines, got"
      f" {config.sentences_of!r}, which none has: name the passage's key"
    )
  return passages.from_sentences(collection, owner), digest


def _dealt(
  config: Any, judged: passages.JudgedPassages
) -> passages.JudgedPassages:
  """Gives every passage the client that the partition says."""
  if config.partition == "client":
    return judged
  if config.partition == "genre":
    urls = newsqa.read_urls([pathlib.Path(one) for one in config.urls])
    return partitions.by_genre(judged, urls)
  labels = partitions.label_by_questions(judged, _first_word)
  return partitions.dirichlet(
    judged,
    labels,
    num_clients=config.num_clients,
    alpha=math.inf if config.partition == "iid" else config.alpha,
    seed=config.partition_seed,
  )


def _first_word(question: passages.Question) -> str:
  return next(iter(question.text.lower().split()), "")


def thinned(data: Data, share: float) -> Data:
  """Returns the data with a share of every client's train questions.

  Args:
    data: all of it.
    share: in (0, 1]; a client keeps one question at least, and the questions
      of a share are among those of a larger one.
  """
  rows = [
    _drawn(total, max(1, round(share * total)), 0)
    for total in (len(one.splits[TRAIN]) for one in data.clients)
  ]
  return dataclasses.replace(
    data,
    clients=tuple(map(_with_rows, data.clients, rows)),
    tokens=tuple(
      dataclasses.replace(
        one,
        questions={**one.questions, TRAIN: one.questions[TRAIN][at]},
        answers={
          **one.answers,
          TRAIN: tuple(one.answers[TRAIN][i] for i in at),
        },
      )
      for one, at in zip(data.tokens, rows, strict=True)
    ),
    digest=artifacts.fingerprint(data.digest, share),
  )


def _largest(
  clients: Sequence[clients_lib.Client], config: Any
) -> list[clients_lib.Client]:
  """Keeps `config.max_clients` with the most test questions, in their order."""
  if config.max_clients is None:
    return list(clients)
  if config.partition == "genre":
    clients = [one for one in clients if one.name != partitions.REST]
  by_size = sorted(
    clients, key=lambda one: (-len(one.splits[config.test_split]), one.name)
  )
  names = {one.name for one in by_size[: config.max_clients]}
  return [one for one in clients if one.name in names]


def _cut(client: clients_lib.Client, config: Any) -> clients_lib.Client:
  """Leaves so many train questions at most, drawn at random, in their order."""
  total, limit = len(client.splits[TRAIN]), config.max_train_questions
  if limit is None or total <= limit:
    return client
  return _with_rows(client, _drawn(total, limit, config.partition_seed))


def _with_rows(
  client: clients_lib.Client, rows: np.ndarray
) -> clients_lib.Client:
  questions = client.splits[TRAIN]
  kept = clients_lib.Questions(
    ids=tuple(questions.ids[i] for i in rows),
    texts=tuple(questions.texts[i] for i in rows),
    answers=tuple(questions.answers[i] for i in rows),
  )
  return dataclasses.replace(client, splits={**client.splits, TRAIN: kept})


def _drawn(total: int, size: int, seed: int) -> np.ndarray:
  """Returns positions, in order; fewer are among those of more."""
  return np.sort(np.random.default_rng([seed, total]).permutation(total)[:size])


def _facts(
  config: Any,
  federation: clients_lib.Federation,
  kept: tuple[clients_lib.Client, ...],
) -> Facts:
  return Facts(
    source=pathlib.Path(config.source.partition(":")[2] or config.source).name,
    partition=config.partition,
    num_left_out=len(federation.clients) - len(kept),
    num_foreign_judgements=federation.num_foreign_judgements,
    num_lost_questions=federation.num_lost_questions,
    clients=tuple(
      ClientFacts(
        name=client.name,
        num_passages=len(client.passage_ids),
        num_sentences=len(client.sentences),
        num_train=len(client.splits[TRAIN]),
        num_test=len(client.splits[config.test_split]),
      )
      for client in kept
    ),
  )
