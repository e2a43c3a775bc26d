"""Assigns passages and questions to clients, as texts and as tokens."""

import dataclasses
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
]

PARTITIONS = ("client", "genre", "dirichlet")
"""Rules that assign passages to clients."""

TRAIN = clients_lib.TRAIN

_SETTINGS = (  # fields that the data depends on besides its source, in order
  "partition", "sentences_of", "num_clients", "alpha", "partition_seed",
  "test_split", "max_train_questions", "min_test_questions", "max_clients",
  "max_sentences", "query_length", "sentence_length",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientFacts:
  """Counts of one client; as private as its texts."""

  name: str
  """Name of the client."""
  num_passages: int
  """Passages of the client."""
  num_sentences: int
  """Sentences of the client."""
  num_train: int
  """Train questions."""
  num_test: int
  """Test questions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Counts of the data."""

  source: str
  """Name of the source."""
  partition: str
  """Rule that assigned passages to clients, one of `PARTITIONS`."""
  num_left_out: int
  """Clients left out because of too few questions or `max_clients`."""
  num_foreign_judgements: int
  """Judgements of another client's passage; left out."""
  num_lost_questions: int
  """Questions without any answer among their client's passages; left out."""
  clients: tuple[ClientFacts, ...]
  """Counts of each client."""
  num_shared_passages: int = 0
  """Passages that name no client; held by clients whose questions they answer."""
  num_unheld_passages: int = 0
  """Passages that name no client and that none holds; left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """Texts and tokens of all clients, in the same order."""

  clients: tuple[clients_lib.Client, ...] = dataclasses.field(repr=False)
  """Clients with their texts."""
  tokens: tuple[clients_lib.Tokens, ...] = dataclasses.field(repr=False)
  """Tokens of the clients."""
  facts: Facts
  """Counts of the data."""
  digest: str
  """Fingerprint of the source, the vocabulary and the settings of the data."""


def build(config: Any) -> Data:
  """Reads the source, assigns passages and questions to clients, and tokenizes.

  Args:
    config: a `federated.Config`.

  Raises:
    ValueError: if the source cannot be read, lacks a split, or leaves fewer than
      two clients with enough train and test questions.
  """
  judged, source = _read_source(config)
  splits = [TRAIN, config.test_split]
  if config.is_chosen:
    splits.append(config.dev_split)
  for split in splits:
    if split not in judged.splits():
      raise ValueError(
        f"federated.Config: expected a split {split!r} in"
        f" {config.source}, got {', '.join(judged.splits()) or 'none'}: name one"
        " of these"
      )
  members, counts = clients_lib.build(_assign(config, judged))
  enough = [
    client
    for client in members
    if len(client.splits[TRAIN])
    and len(client.splits[config.test_split]) >= config.min_test_questions
  ]
  selected = _select_largest(enough, config)
  if len(selected) < 2:
    raise ValueError(
      f"federated.Config: expected two clients or more with {TRAIN}"
      " questions and at least"
      f" {config.min_test_questions} {config.test_split} questions, got"
      f" {len(selected)} of {len(members)}: change the partition, the"
      " splits, min_test_questions or max_clients"
      + _explain_lost(counts["num_lost_questions"])
    )
  selected = tuple(_draw_questions(client, config) for client in selected)
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
    clients=selected,
    tokens=tuple(
      clients_lib.tokenize(
        client,
        pieces,
        query_length=config.query_length,
        sentence_length=config.sentence_length,
      )
      for client in selected
    ),
    facts=_make_facts(
      config, selected, num_left_out=len(members) - len(selected), **counts
    ),
    digest=artifacts.fingerprint(
      source,
      fingerprints.of_file(words),
      *(getattr(config, name) for name in _SETTINGS),
      *([config.dev_split] if config.is_chosen else []),
      *map(fingerprints.of_file, config.urls),
      fingerprints.versions(),
    ),
  )


def _explain_lost(number: int) -> str:
  """Returns a remedy for questions that name a client without their passages."""
  if not number:
    return ""
  return (
    f"; {number:,} questions have no answer among their client's passages: write"
    " the names of clients alike in queries and passages"
  )


def _read_source(config: Any) -> tuple[passages.JudgedPassages, str]:
  """Returns the judged passages and a digest of their source."""
  source = sources.open(config.source, "federated.Config.source")
  if source.kind == "newsqa":  # its answers are spans of the text
    stories = newsqa.read(source.location)
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
  owner = beir.read_key(source.location, config.sentences_of)
  if not owner:
    raise ValueError(
      f"{setting} must be a key of corpus.jsonl's lines, got"
      f" {config.sentences_of!r}, which none has: name the passage's key"
    )
  return passages.from_sentences(collection, owner), digest


def _assign(
  config: Any, judged: passages.JudgedPassages
) -> passages.JudgedPassages:
  """Assigns every passage to a client by the partition's rule."""
  if config.partition == "client":
    return judged
  if config.partition == "genre":
    urls = newsqa.read_urls([pathlib.Path(path) for path in config.urls])
    return partitions.by_genre(judged, urls)
  labels = partitions.label_by_questions(judged)
  return partitions.dirichlet(
    judged,
    labels,
    num_clients=config.num_clients,
    alpha=config.alpha,
    seed=config.partition_seed,
  )


def _select_largest(
  clients: Sequence[clients_lib.Client], config: Any
) -> list[clients_lib.Client]:
  """Selects `config.max_clients` with the most test questions, in their order."""
  if config.max_clients is None:
    return list(clients)
  if config.partition == "genre":
    clients = [client for client in clients if client.name != partitions.REST]
  by_size = sorted(
    clients,
    key=lambda client: (-len(client.splits[config.test_split]), client.name),
  )
  names = {client.name for client in by_size[: config.max_clients]}
  return [client for client in clients if client.name in names]


def _draw_questions(
  client: clients_lib.Client, config: Any
) -> clients_lib.Client:
  """Draws at most `config.max_train_questions` of a client, in their order.

  A larger draw includes a smaller one.
  """
  questions, limit = client.splits[TRAIN], config.max_train_questions
  if limit is None or len(questions) <= limit:
    return client
  rng = np.random.default_rng([config.partition_seed, len(questions)])
  rows = np.sort(rng.permutation(len(questions))[:limit])
  train = clients_lib.Questions(
    ids=tuple(questions.ids[i] for i in rows),
    texts=tuple(questions.texts[i] for i in rows),
    answers=tuple(questions.answers[i] for i in rows),
  )
  return dataclasses.replace(client, splits={**client.splits, TRAIN: train})


def _make_facts(
  config: Any, selected: Sequence[clients_lib.Client], **counts: int
) -> Facts:
  return Facts(
    source=pathlib.Path(config.source.partition(":")[2] or config.source).name,
    partition=config.partition,
    **counts,
    clients=tuple(
      ClientFacts(
        name=client.name,
        num_passages=len(client.passage_ids),
        num_sentences=len(client.sentences),
        num_train=len(client.splits[TRAIN]),
        num_test=len(client.splits[config.test_split]),
      )
      for client in selected
    ),
  )
