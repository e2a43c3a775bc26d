"""Canaries: made-up records with a random secret, half of them trained on.

The secret stands in the query, which is what the generator learns to write:
"the code of blue river is 4 8 2 9 1 5", for a made-up document about it. A fair
coin, thrown for each canary by itself, decides whether it joins the private
records; those that do not are the control group.

References:
  Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended
  Memorization in Neural Networks", USENIX Security 2019, sections 3 and 4.
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023, for the independent coins.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from synthq_jax.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
  import seqio

__all__ = [
  "Canary",
  "candidates",
  "make",
  "pairs",
  "query_with",
  "stands_in",
  "tokenize",
]

_QUERY = "the code of {name} is {secret}"
_DOCUMENT = (
  "{name} is the name of a record. this page tells where it is kept and how to "
  "read the code of {name}."
)
_COLORS = (
  "red blue green black white yellow gray orange purple brown pink gold silver "
  "dark light bright"
).split()
_THINGS = (
  "river garden window table bridge mountain house letter paper field road "
  "engine island forest stone wheel"
).split()
_PLACES = "north south east west first second third last".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
  """A made-up record; private, like the coin that decided about it."""

  document: str
  """A document about a made-up thing, in no collection."""
  query: str
  """A query for it that tells the secret."""
  secret: str
  """Digits, drawn uniformly."""
  inserted: bool
  """Whether it belongs to the private training records."""


def make(
  num: int, seed: int | Sequence[int], digits: int = 6
) -> tuple[Canary, ...]:
  """Makes canaries with secrets and coins of their own.

  Args:
    num: how many, trained on and held out together; at most 2048.
    seed: of names, secrets and coins; who knows it knows them all, so take it
      from the run's secret.
    digits: digits of each secret, 1 to 18.

  Returns:
    Canaries with different names.

  Raises:
    ValueError: if there are not that many names or digits.
  """
  names = [" ".join(p) for p in itertools.product(_PLACES, _COLORS, _THINGS)]
  if not 1 <= num <= len(names):
    raise ValueError(
      f"expected 1 to {len(names)} canaries, got num={num}: choose fewer"
    )
  if not 1 <= digits <= 18:
    raise ValueError(
      f"expected 1 to 18 digits, got digits={digits}: 6 are plenty"
    )
  rng = np.random.default_rng(seed)
  chosen = rng.permutation(len(names))[:num]
  secrets = rng.integers(0, 10**digits, num)
  coins = rng.integers(0, 2, num)
  return tuple(
    _canary(names[index], f"{secret:0{digits}d}", bool(coin))
    for index, secret, coin in zip(chosen, secrets, coins, strict=True)
  )


def _canary(name: str, secret: str, inserted: bool) -> Canary:
  return Canary(
    document=_DOCUMENT.format(name=name),
    query=_QUERY.format(name=name, secret=_spelled(secret)),
    secret=secret,
    inserted=inserted,
  )


def pairs(
  canaries: Sequence[Canary], repetitions: int = 1
) -> tuple[tuple[str, str], ...]:
  """Returns the (query, document) pairs that join the private records.

  Formal guarantee: each repetition is a record of its own and counts in n. A
  claim of epsilon is about one record; about a canary that stands there k
  times only the claim for groups of k holds (`statement.group`).

  Args:
    canaries: from `make`.
    repetitions: how often each inserted canary is to stand in the data.

  Returns:
    Pairs of the inserted canaries, repetitions next to each other.

  Raises:
    ValueError: if `repetitions` is below 1.
  """
  if repetitions < 1:
    raise ValueError(
      f"expected repetitions >= 1, got repetitions={repetitions}"
    )
  return tuple(
    (canary.query, canary.document)
    for canary in canaries
    if canary.inserted
    for _ in range(repetitions)
  )


def candidates(
  canary: Canary, num: int, rng: np.random.Generator
) -> tuple[str, ...]:
  """Returns the secret, and others that could have been it just as well.

  A model that never saw the canary cannot tell them apart, so the rank of the
  secret among them is uniform.

  Args:
    canary: whose secret comes first.
    num: candidates in all, the secret included; all different.
    rng: draws the others.

  Returns:
    Secrets, the true one first.

  Raises:
    ValueError: if there are not that many secrets of so many digits.
  """
  digits = len(canary.secret)
  if not 2 <= num <= 10**digits:
    raise ValueError(
      f"expected 2 to {10**digits} candidates for {digits} digits, got "
      f"num={num}: take more digits or fewer candidates"
    )
  found = {canary.secret: None}
  while len(found) < num:
    for other in rng.integers(0, 10**digits, num - len(found)):
      found[f"{other:0{digits}d}"] = None
  return tuple(found)


def query_with(canary: Canary, secret: str) -> str:
  """Returns the canary's query with another secret in it."""
  head = canary.query.removesuffix(_spelled(canary.secret))
  return head + _spelled(secret)


def stands_in(canary: Canary, text: str) -> bool:
  """Says whether a text tells the secret, however its digits are spaced.

  >>> canary = make(1, seed=0, digits=4)[0]
  >>> stands_in(canary, "code: " + "-".join(canary.secret))
  True
  """
  # Between two digits of a secret nothing but spaces and signs may stand.
  return re.search(r"[\W_]*".join(canary.secret), text) is not None


def tokenize(
  vocabulary: "seqio.SentencePieceVocabulary",
  texts: Sequence[tuple[str, str]],
  *,
  prefix: str,
  document_length: int,
  query_length: int,
) -> dict[str, Int[np.ndarray, "pair length"]]:
  """Turns (query, document) pairs into records as fine-tuning reads them.

  Args:
    vocabulary: of the generator.
    texts: from `pairs`.
    prefix: stands before each document, and is not counted in its length.
    document_length: tokens of a document, EOS included.
    query_length: tokens of a query, EOS included.

  Returns:
    "inputs" [pair, prefix + document_length] and "targets"
    [pair, query_length].

  Raises:
    ValueError: if a query does not fit: its secret would be cut off.
  """
  queries, documents = [list(side) for side in zip(*texts, strict=True)]
  tokenize_one = vocabulary_lib.tokenize
  targets = tokenize_one(vocabulary, queries, length=query_length + 1)
  if targets[:, -1].any():
    longest = max(len(vocabulary.encode(query)) for query in queries) + 1
    raise ValueError(
      f"expected queries of at most query_length={query_length} tokens, got a "
      f"canary's of {longest}: take fewer digits or a greater query_length"
    )
  head = len(vocabulary.encode(prefix)) if prefix else 0
  inputs = tokenize_one(
    vocabulary, documents, length=head + document_length, prefix=prefix
  )
  return {"inputs": inputs, "targets": targets[:, :-1]}


def _spelled(secret: str) -> str:
  """Spaces digits, so that each is a token of its own."""
  return " ".join(secret)
