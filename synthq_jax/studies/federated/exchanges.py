"""Builds the exchanges of negatives whose cost, promise and gain are compared.

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

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import (
  exchange,
  generated_sentences,
  messages,
  noised_vectors,
  passages,
)
from synthq_jax.studies.federated import training

__all__ = ["KINDS", "PROMISING", "Public", "build"]

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
PROMISING = KINDS[4:-1]
"""Rows with a bound above 0, below infinity."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Public:
  """What every client has before anything is exchanged, beside the T5."""

  settings: Any
  """A `federated.Exchanges`."""
  vocabulary: Any
  length: int
  """Tokens of a sentence."""

  def vectors(
    self, context: training.Context, texts: Sequence[str]
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
  public: Public, kind: str, context: training.Context, seed: int
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
    "run": f"exchange/seed {seed}",
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
  start, own = context.start, {}
  for at, tokens in enumerate(context.data.tokens):
    party = context.party(
      at, start, context.sentences(start, at), is_public=True
    )
    own[tokens.name] = messages.summary(
      party, centres, key=_keys(seed, at)["summary"], **noise
    )
  return exchange.SharedOnce(shared=own, top=everybody)


def _generated(
  public: Public, context: training.Context, seed: int
) -> dict[str, messages.Shared]:
  """Has every client train a generator, and shares what it writes."""
  settings, found = public.settings, {}
  for at, client in enumerate(context.data.clients):
    written = generated_sentences.from_collection(
      context.params,
      context.model,
      public.vocabulary,
      client,
      settings.generator,
      run=f"exchange/seed {seed}",
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


def _keys(seed: int, client: int) -> dict[str, jax.Array]:
  """Returns a client's keys, none of which is another's child."""
  own = jax.random.fold_in(jax.random.key(seed), client)
  summary, generator = jax.random.split(own)
  return {"summary": summary, "generator": generator}
