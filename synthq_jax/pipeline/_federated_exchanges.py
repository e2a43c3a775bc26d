"""What an exchange of negatives costs, promises and gives.

All rows of this table start from the PUBLIC encoder, whose sentence tower stays:
a promise about vectors holds only where the encoder has read nobody's texts, and
only for the first round, after which query towers have. So negatives are asked
for once.

Secrets of these exchanges come from the seed of the study, which is public: the
promises are what the same exchange earns with secret ones, and nothing that was
sent here may be released.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from synthq_jax import typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import (
  exchange,
  generated_sentences,
  messages,
  noised_vectors,
  passages,
)
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
_PROMISING = KINDS[4:-1]  # a bound above 0, below infinity


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
    default_factory=lambda: generated_sentences.Settings(epsilon=4.0, steps=50)
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

  def public_digest(self) -> str:
    """Returns what public sentences depend on, "" if no row needs any."""
    if not {"noised cells", "summaries", "public corpus"} & set(self.kinds):
      return ""
    return self.source().digest()

  def source(self) -> _sources.Source:
    """Returns where public sentences come from."""
    return _sources.parse(
      self.public_source, "federated_study.Exchanges.public_source"
    )

  def check(self, num_copies: int) -> None:
    """Refuses promises that collections do not allow.

    Args:
      num_copies: passages that clients hold because a question is theirs:
        whatever is sent of such a collection depends on that question.

    Raises:
      ValueError: if there are any, and something is promised.
    """
    promising = [kind for kind in self.kinds if kind in _PROMISING]
    if num_copies and promising:
      raise ValueError(
        "federated_study.Exchanges.kinds: expected passages that all name their"
        f" client, got {num_copies} that a question brought to it, for which"
        f" {promising} would promise too much: name the clients of all passages"
        " in the data, or leave these rows out"
      )


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
    found: dict[str, None] = {}
    for document in self.settings.source().read().documents:
      found |= dict.fromkeys(passages.split_sentences(document.contents))
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
    own[tokens.name] = messages.summary(
      party, centres, key=_keys(seed, at)["summary"], **noise
    )
  return exchange.SharedOnce(shared=own, top=everybody)


def _generated(
  public: Public, context: _federated_training.Context, seed: int
) -> dict[str, messages.Shared]:
  """Has every client train a generator, and shares what it writes."""
  settings, found = public.settings, {}
  for at, client in enumerate(context.data.clients):
    written = generated_sentences.from_collection(
      public.params,
      public.model,
      public.vocabulary,
      client,
      settings.generator,
      run=_run(seed),
      count=settings.generated,
      key=_keys(seed, at)["generator"],
      batch_seed=(seed, at),
      directory=context.place(f"generator {at}", seed, ()),
    )
    found[client.name] = messages.sentences(
      written.texts,
      public.vectors(context, written.texts),
      generator=written.promise,
    )
  return found


def _run(seed: int) -> str:
  return f"exchange/seed {seed}"


def _keys(seed: int, client: int) -> dict[str, jax.Array]:
  """Returns a client's keys, none of which is another's child."""
  own = jax.random.fold_in(jax.random.key(seed), client)
  summary, generator = jax.random.split(own)
  return {"summary": summary, "generator": generator}
