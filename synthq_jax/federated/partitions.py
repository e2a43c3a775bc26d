"""Assigns passages to clients if the collection names none.

Each function sets the clients of passages and removes the clients of questions.
Then `clients.build` assigns each question to the client that holds the first
passage that answers it. A collection that names its clients (MedQuAD's sites, the
packages of the demo set) needs no such function.

References:
  Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution
  for Federated Visual Classification", 2019, arXiv:1909.06335 (the draw of
  labels by client).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from synthq_jax import checks
from synthq_jax.data import newsqa
from synthq_jax.federated import passages as passages_lib

__all__ = ["REST", "by_genre", "by_label", "dirichlet", "label_by_questions"]

REST = "other"
"""Client of passages without a known genre."""


def by_label(
  judged: passages_lib.JudgedPassages, labels: Mapping[str, str]
) -> passages_lib.JudgedPassages:
  """Makes a client of each label.

  Args:
    judged: passages and questions; their clients are replaced.
    labels: passage id -> label. A passage without a label, or with "", has no
      client; `clients.build` gives it to the clients whose questions it answers.

  Returns:
    The passages and questions with new clients.
  """
  return passages_lib.JudgedPassages(
    passages=tuple(
      dataclasses.replace(passage, client=labels.get(passage.id, ""))
      for passage in judged.passages
    ),
    questions=tuple(
      dataclasses.replace(question, client="") for question in judged.questions
    ),
  )


def by_genre(
  judged: passages_lib.JudgedPassages,
  urls: Mapping[str, str],
) -> passages_lib.JudgedPassages:
  """Makes a client of each genre that the passages' URLs or paths name.

  Args:
    judged: passages and questions; their clients are replaced.
    urls: passage id -> URL or path.

  Returns:
    The passages and questions with new clients. The client "other" has the
    passages without genre or URL.
  """
  genres = {p.id: newsqa.genre(urls.get(p.id, "")) for p in judged.passages}
  return by_label(judged, {name: g or REST for name, g in genres.items()})


def label_by_questions(judged: passages_lib.JudgedPassages) -> dict[str, str]:
  """Labels passages by the first words of the questions they answer.

  Args:
    judged: passages and questions.

  Returns:
    Passage id -> first word of the first question that it answers, without
    passages that answer none.
  """
  labels: dict[str, str] = {}
  for question in judged.questions:
    first = next(iter(question.text.lower().split()), "")
    for passage in question.answers:
      labels.setdefault(passage, first)
  return labels


def dirichlet(
  judged: passages_lib.JudgedPassages,
  labels: Mapping[str, str],
  *,
  num_clients: int,
  alpha: float,
  seed: int,
) -> passages_lib.JudgedPassages:
  """Deals passages to clients that prefer different labels.

  Each client draws its shares of the labels from a Dirichlet distribution with
  concentration alpha times the labels' frequencies. Then it draws its passages;
  each passage has one client. Numbers of passages differ by at most one between
  clients, and so do numbers of labelled passages. Passages without a label are
  dealt at random. A label that runs out is drawn no more, so the last clients
  follow their shares less closely than the first. Numbers of questions differ
  more than numbers of passages; with many clients, many have no question.

  Args:
    judged: passages and questions; their clients are replaced.
    labels: passage id -> label, for some or all passages.
    num_clients: number of clients, at most one for each passage.
    alpha: concentration, above 0. A small value gives clients of almost one
      label.
    seed: seed of NumPy's generator.

  Returns:
    The passages and questions with clients "client_0", "client_1" and so on, with
    zeros before numbers of fewer digits.

  Raises:
    ValueError: if there are more clients than passages.
  """
  checks.within(f"[1, {len(judged.passages)}]", num_clients=num_clients)
  rng = np.random.default_rng(seed)
  ids = [judged.passages[i].id for i in rng.permutation(len(judged.passages))]
  labelled = [id_ for id_ in ids if id_ in labels]
  others = [id_ for id_ in ids if id_ not in labels]
  sizes = [len(part) for part in np.array_split(labelled, num_clients)]
  dealt = _deal(labelled, labels, sizes, alpha, rng)
  # The largest parts of `labelled` come first, so those of `others` come last.
  rest = np.array_split(others[::-1], num_clients)[::-1]
  width = len(str(num_clients - 1))
  return by_label(
    judged,
    {
      str(id_): f"client_{client:0{width}d}"
      for client, parts in enumerate(zip(dealt, rest, strict=True))
      for part in parts
      for id_ in part
    },
  )


def _deal(
  ids: Sequence[str],
  labels: Mapping[str, str],
  sizes: Sequence[int],
  alpha: float,
  rng: np.random.Generator,
) -> list[list[str]]:
  """Deals labelled passages to clients, by shares drawn for each client."""
  piles: dict[str, list[str]] = {
    label: [] for label in sorted(set(labels.values()))
  }
  for id_ in ids:
    piles[labels[id_]].append(id_)
  piles = {label: pile for label, pile in piles.items() if pile}
  left = np.array([len(pile) for pile in piles.values()], int)
  frequencies = left / max(len(ids), 1)
  dealt = []
  for size in sizes:
    shares = rng.dirichlet(alpha * frequencies) if size else frequencies
    taken = _draw(shares, left, size, rng)
    left = left - taken
    pairs = zip(piles.values(), taken, strict=True)
    dealt.append([pile.pop() for pile, number in pairs for _ in range(number)])
  return dealt


def _draw(
  shares: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator
) -> np.ndarray:
  taken = np.zeros_like(left)
  while (missing := size - taken.sum()) > 0:
    open_ = taken < left
    weights = np.where(open_, shares, 0.0)
    if not weights.sum() > 0:  # all labels with a share have run out
      weights = (left - taken).astype(float)
    drawn = rng.multinomial(missing, weights / weights.sum())
    taken = np.minimum(taken + drawn, left)
  return taken
