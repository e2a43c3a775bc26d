"""The clients of a federated study, as texts and as tokens."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import beir, newsqa, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import clients as clients_lib
from synthq_jax.federated import partitions, passages
from synthq_jax.pipeline import _federated_results as results
from synthq_jax.pipeline import _fingerprints, _sources

__all__ = ["PARTITIONS", "TRAIN", "Data", "build", "thinned", "vocabulary"]

PARTITIONS = ("client", "genre", "dirichlet", "iid")
"""How passages become clients'."""

TRAIN = "train"
"""The split that is trained on."""

_NEWSQA = "newsqa:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """All clients, in one order."""

  clients: tuple[clients_lib.Client, ...] = dataclasses.field(repr=False)
  tokens: tuple[clients_lib.Tokens, ...] = dataclasses.field(repr=False)
  facts: results.Facts
  num_copies: int
  """Passages that a question brought to its client."""
  digest: str
  """Of everything above and of the settings that made it."""


def build(config: Any) -> Data:
  """Reads the source, deals passages and questions to clients, tokenizes.

  Args:
    config: a `federated_study.Config`.

  Raises:
    ValueError: if the source cannot be read, or a client that is left has no
      questions to train or to test on.
  """
  judged, source = _read(config)
  for split in (TRAIN, config.test_split):
    if split not in judged.splits():
      raise ValueError(
        f"federated_study.Config: expected a split {split!r} in"
        f" {config.source}, got {', '.join(judged.splits()) or 'none'}"
      )
  federation = clients_lib.build(_dealt(config, judged))
  kept = clients_lib.with_questions(
    clients_lib.with_questions(federation.clients, TRAIN),
    config.test_split,
    config.min_test_questions,
  )
  if len(kept) < 2:
    raise ValueError(
      f"federated_study.Config: expected two clients or more with {TRAIN}"
      " questions and at least"
      f" {config.min_test_questions} {config.test_split} questions, got"
      f" {len(kept)} of {len(federation.clients)}: change the partition, the"
      " splits or min_test_questions"
    )
  kept = tuple(_cut(client, config) for client in kept)
  pieces = vocabulary(config)
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
    num_copies=federation.num_copies,
    digest=artifacts.fingerprint(
      source,
      _fingerprints.of_file(config.vocabulary or shipped.VOCABULARY),
      config.partition,
      config.sentences_of,
      config.num_clients,
      config.alpha,
      config.partition_seed,
      config.test_split,
      config.max_train_questions,
      config.min_test_questions,
      config.max_sentences,
      config.query_length,
      config.sentence_length,
      _fingerprints.versions(),
    ),
  )


def vocabulary(config: Any) -> Any:
  """Returns the pieces of the configured T5, or of the package's.

  Args:
    config: a `federated_study.Config`.
  """
  if config.vocabulary is not None:
    return vocabulary_lib.load(config.vocabulary)
  return vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def _read(config: Any) -> tuple[passages.JudgedPassages, str]:
  """Returns the passages, and a digest of where they come from."""
  if config.source.startswith(_NEWSQA):
    path = pathlib.Path(config.source.removeprefix(_NEWSQA))
    stories = newsqa.read(path)
    return passages.from_stories(stories), _fingerprints.of_file(path)
  source = _sources.parse(config.source, "federated_study.Config.source")
  collection, digest = source.read(), source.digest()
  if config.sentences_of is None:
    return (
      passages.from_documents(collection, max_sentences=config.max_sentences),
      digest,
    )
  owner = beir.read_key(source.place, config.sentences_of)
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
  if config.partition == "iid":
    return partitions.iid(
      judged, num_clients=config.num_clients, seed=config.partition_seed
    )
  labels = partitions.labels_of_questions(judged, _first_word)
  return partitions.dirichlet(
    judged,
    labels,
    num_clients=config.num_clients,
    alpha=config.alpha,
    seed=config.partition_seed,
  )


def _first_word(question: passages.Question) -> str:
  """Labels a question by how it begins, such as "what" or "who"."""
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


def _cut(client: clients_lib.Client, config: Any) -> clients_lib.Client:
  """Leaves so many train questions at most, drawn at random, in their order."""
  total, limit = len(client.splits[TRAIN]), config.max_train_questions
  if limit is None or total <= limit:
    return client
  return _with_rows(client, _drawn(total, limit, config.partition_seed))


def _with_rows(
  client: clients_lib.Client, rows: np.ndarray
) -> clients_lib.Client:
  """Returns a client with some of its train questions."""
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
) -> results.Facts:
  return results.Facts(
    source=pathlib.Path(config.source.partition(":")[2] or config.source).name,
    partition=config.partition,
    num_left_out=len(federation.clients) - len(kept),
    num_foreign_judgements=federation.num_foreign_judgements,
    num_lost_questions=federation.num_lost_questions,
    clients=tuple(
      results.ClientFacts(
        name=client.name,
        num_passages=len(client.passage_ids),
        num_sentences=len(client.sentences),
        num_train=len(client.splits[TRAIN]),
        num_test=len(client.splits[config.test_split]),
      )
      for client in kept
    ),
  )
