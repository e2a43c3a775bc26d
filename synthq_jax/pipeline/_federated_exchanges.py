"""What an exchange of negatives costs, promises and gives.

All rows of this table start from the PUBLIC encoder, whose sentence tower stays:
a promise about vectors holds only where the encoder has read nobody's texts, and
only for the first round, after which query towers have. So negatives are asked
for once.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from synthq_jax import artifacts, typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import (
  exchange,
  generated_sentences,
  noised_vectors,
  shared,
)
from synthq_jax.federated import query_messages as messages
from synthq_jax.federated import sentences as sentences_lib
from synthq_jax.models import t5_config
from synthq_jax.pipeline import (
  _federated_methods,
  _federated_training,
  _sources,
  config_types,
)

__all__ = ["KINDS", "Exchanges", "Public", "build"]

KINDS = (
  "none",
  "raw float32",
  "raw float16",
  "raw int8",
  "noised questions",
  "noised cells",
  "summaries",
  "generated sentences",
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
  generator: generated_sentences.Settings = dataclasses.field(
    default_factory=lambda: generated_sentences.Settings(epsilon=4.0)
  )
  """Of a client's generator of sentences."""
  generated: int = 200
  """Sentences that each generator writes."""

  def __post_init__(self):
    if self.kinds:
      config_types.some_of(self, "kinds", KINDS)
    config_types.at_least(
      self, 1, "top", "capacity", "cells", "public_sentences"
    )
    config_types.positive(self, "noise_multiplier")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Public:
  """What every client has before anything is exchanged."""

  settings: Exchanges
  params: typing.Params
  """Of the public T5, decoder included."""
  model: t5_config.T5Config
  vocabulary: Any
  length: int
  """Tokens of a sentence."""

  def vectors(
    self, context: _federated_training.Context, texts: Sequence[str]
  ) -> np.ndarray:
    """Returns the vectors of texts by the public encoder."""
    tokens = vocabulary_lib.tokenize(self.vocabulary, texts, length=self.length)
    return context.encoders.encode_sentences(context.start, tokens)

  @functools.cached_property
  def sentences(self) -> tuple[str, ...]:
    """Public sentences, taken evenly over their collection."""
    source = _sources.parse(
      self.settings.public_source, "federated_study.Exchanges.public_source"
    )
    found: dict[str, None] = {}
    for document in source.read().documents:
      found |= dict.fromkeys(sentences_lib.split(document.contents))
    texts = list(found)
    at = np.linspace(0, len(texts) - 1, self.settings.public_sentences)
    return tuple(texts[i] for i in np.unique(at.astype(int)))


def build(
  public: Public,
  kind: str,
  context: _federated_training.Context,
  seed: int,
) -> exchange.Exchange | None:
  """Builds one exchange.

  Args:
    public: what every client has, and the settings of the table.
    kind: one of `KINDS`.
    context: clients and the public towers.
    seed: of the exchange's secrets.
  """
  settings = public.settings
  if kind == "none":
    return None
  form, _, dtype = kind.partition(" ")
  if form == "raw":
    return exchange.FedNegative(top=settings.top, dtype=dtype)
  everybody = settings.top * (len(context.data.tokens) - 1)
  if kind == "generated sentences":
    return exchange.SharedOnce(
      shared=_generated(public, context, seed), top=everybody
    )
  noise: Mapping[str, Any] = {
    "run": _run(seed),
    "noise_multiplier": settings.noise_multiplier,
    "capacity": settings.capacity,
  }
  if kind == "noised questions":
    return exchange.FedNegative(
      queries=messages.NoisedRows(**noise), top=settings.top
    )
  vectors = public.vectors(context, public.sentences)
  if kind == "public corpus":
    return exchange.PublicCorpus(vectors=vectors, top=everybody)
  centres = noised_vectors.centres(vectors, settings.cells, seed=0)
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
    own[tokens.name] = shared.summary(
      party, centres, key=_key(seed, at), **noise
    )
  return exchange.SharedOnce(shared=own, top=everybody)


def _generated(
  public: Public, context: _federated_training.Context, seed: int
) -> dict[str, shared.Shared]:
  """Has every client train a generator, and shares what it writes."""
  settings, found = public.settings, {}
  for at, client in enumerate(context.data.clients):
    place = context.place(f"generator {at}", seed, ())
    written = generated_sentences.from_collection(
      public.params,
      public.model,
      public.vocabulary,
      client,
      settings.generator,
      run=_run(seed),
      count=settings.generated,
      key=jax.random.fold_in(_key(seed, at), 1),  # not that of a summary
      batch_seed=(seed, at),
      directory=place / artifacts.fingerprint(settings.generator),
    )
    found[client.name] = shared.sentences(
      written.texts,
      public.vectors(context, written.texts),
      generator=written.promise,
    )
  return found


def _run(seed: int) -> str:
  return f"exchange/seed {seed}"


def _key(seed: int, client: int) -> jax.Array:
  return jax.random.fold_in(jax.random.key(seed), client)
