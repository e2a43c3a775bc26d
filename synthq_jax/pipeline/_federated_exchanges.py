"""What an exchange of negatives costs, promises and gives.

All rows of this table start from the PUBLIC encoder, whose sentence tower stays:
a promise about vectors holds only where the encoder has read nobody's texts, and
only for the first round, after which query towers have. So negatives are asked
for once.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import exchange, noised_vectors, shared
from synthq_jax.federated import query_messages as messages
from synthq_jax.federated import sentences as sentences_lib
from synthq_jax.pipeline import (
  _federated_methods,
  _federated_training,
  _sources,
  config_types,
)

__all__ = ["KINDS", "Exchanges", "build", "public_tokens"]

KINDS = (
  "none",
  "raw float32",
  "raw float16",
  "raw int8",
  "noised questions",
  "noised cells",
  "summaries",
  "public corpus",
)
"""Rows of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanges:
  """The table of exchanges."""

  kinds: tuple[str, ...] = ()
  """Some of `KINDS`; () for no table."""
  top: int = 10
  """Sentences of each partner for a question; of what is searched at home, the
  best of all partners, as many as they have together."""
  noise_multiplier: float = 1.0
  """Of noised questions, cells and summaries."""
  capacity: int = 8192
  """A public bound of a client's questions, and of its passages."""
  cells: int = 40
  """Centres, of public sentences."""
  public_source: str = "environment_docs"
  """Of public sentences: a source of runs."""
  public_sentences: int = 10_000
  """How many of them."""

  def __post_init__(self):
    if self.kinds:
      config_types.some_of(self, "kinds", KINDS)
    config_types.at_least(
      self, 1, "top", "capacity", "cells", "public_sentences"
    )
    config_types.positive(self, "noise_multiplier")


def build(
  settings: Exchanges,
  kind: str,
  context: _federated_training.Context,
  vectors: Callable[[], np.ndarray],
  seed: int,
) -> exchange.Exchange | None:
  """Builds one exchange.

  Args:
    settings: of the table.
    kind: one of `KINDS`.
    context: clients and the public towers.
    vectors: returns the public sentences' vectors by the public encoder.
    seed: of the exchange's secrets.
  """
  if kind == "none":
    return None
  form, _, dtype = kind.partition(" ")
  if form == "raw":
    return exchange.FedNegative(top=settings.top, dtype=dtype)
  everybody = settings.top * (len(context.data.tokens) - 1)
  if kind == "public corpus":
    return exchange.PublicCorpus(vectors=vectors(), top=everybody)
  run = f"exchange/seed {seed}"
  noise: Mapping[str, Any] = {
    "run": run,
    "noise_multiplier": settings.noise_multiplier,
    "capacity": settings.capacity,
  }
  if kind == "noised questions":
    return exchange.FedNegative(
      queries=messages.NoisedRows(**noise), top=settings.top
    )
  centres = noised_vectors.centres(vectors(), settings.cells, seed=0)
  if kind == "noised cells":
    return exchange.FedNegative(
      queries=messages.NoisedCells(centres=centres, **noise), top=settings.top
    )
  own = {}
  for at, tokens in enumerate(context.data.tokens):
    party = _federated_methods.party(
      context,
      at,
      context.start,
      context.sentences(context.start, at),
      is_public=True,
    )
    key = jax.random.fold_in(jax.random.key(seed), at)
    own[tokens.name] = shared.summary(party, centres, key=key, **noise)
  return exchange.SharedOnce(shared=own, top=everybody)


def public_tokens(
  settings: Exchanges, vocabulary: Any, length: int
) -> np.ndarray:
  """Returns public sentences as tokens, [sentence, length].

  Args:
    settings: where they come from, and how many are taken: evenly over the
      collection.
    vocabulary: of the encoder.
    length: as of the clients' sentences.
  """
  source = _sources.parse(
    settings.public_source, "federated_study.Exchanges.public_source"
  )
  found: dict[str, None] = {}
  for document in source.read().documents:
    found |= dict.fromkeys(sentences_lib.split(document.contents))
  texts: Sequence[str] = list(found)
  at = np.linspace(0, len(texts) - 1, settings.public_sentences).astype(int)
  chosen = tuple(texts[i] for i in np.unique(at))
  return vocabulary_lib.tokenize(vocabulary, chosen, length=length)
