"""What an inverter reads, in figures: perplexity, bits, BLEU, secrets.

Each figure stands beside its controls: a decoder that was trained the same way
with the vector hidden, and the same decoder given the vector of another
sentence, which is worth nothing or less.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax import intervals, typing
from synthq_jax.audit import inversion, vector_secrets
from synthq_jax.generation import text_measures

__all__ = ["Decoders", "Reading", "SecretsRead", "read_secrets", "reading"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoders:
  """An attacker, and the decoder that it is compared with."""

  inverter: inversion.Inverter
  """The shape of both."""
  params: typing.Params
  """Trained on vectors as they are sent."""
  hidden: typing.Params
  """Trained the same way with vectors hidden."""
  noise: float
  """Standard deviation that vectors are sent with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """What was read of a client's sentences; as private as these."""

  num_sentences: int
  """Sentences of the client, none of which the attacker trained on."""
  perplexity: float
  """Per token, given the vector."""
  perplexity_hidden: float
  """Per token, of the decoder trained without it."""
  perplexity_other: float
  """Per token, given the vector of another sentence."""
  bits: intervals.Interval
  """Bits a sentence that the vector saves, against the decoder without it."""
  bits_other: intervals.Interval
  """The same for the vector of another sentence: at most about 0."""
  bleu: float
  """Of what is written given the vector, 0 to 100."""
  bleu_hidden: float
  """Of the one text that is written without it."""
  bleu_other: float
  """Of what is written given the vector of another sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecretsRead:
  """What was found of planted secrets; as private as these."""

  nearest: vector_secrets.Recovery
  """By the nearest candidate's vector."""
  nearest_other: vector_secrets.Recovery
  """The same, of another sentence's vector: chance."""
  likelihood: vector_secrets.Recovery
  """By the decoder's likelihood of each candidate."""
  likelihood_other: vector_secrets.Recovery
  """The same, given another sentence's vector: chance."""
  written: intervals.Interval
  """Share of secrets that stand in what the decoder writes."""
  written_other: intervals.Interval
  """The same, given another sentence's vector: chance."""


def reading(
  decoders: Decoders,
  vectors: Float[np.ndarray, "sentence dim"],
  tokens: Int[np.ndarray, "sentence length"],
  *,
  to_text: Callable[[Sequence[int]], str],
  key: Key[Array, ""],
) -> Reading:
  """Measures how well the attacker reads a client's sentences.

  The bits are the mean difference of -log2 P(sentence) between the decoder
  without the vector and the one with it: the information that this attacker
  can use. Were the decoder without the vector perfect, they could not exceed
  the mutual information of sentence and vector; they overstate it by at most as
  much as that decoder has still to learn (its Kullback-Leibler divergence from
  the truth).

  Formal guarantee: none; a lower bound in the sense of `inversion`'s formal
  statement. The 95% intervals are Student's, over sentences taken as independent.

  Args:
    decoders: the attacker.
    vectors: true vectors of the client's sentences, by its encoder.
    tokens: the sentences, with EOS, 0 = padding.
    to_text: turns tokens without padding and EOS into text.
    key: of the noise and of the order of the control.

  Returns:
    The figures.
  """
  noise_key, order_key = jax.random.split(key)
  inverter, params = decoders.inverter, decoders.params
  sent = inversion.send(decoders.noise, vectors, noise_key)
  other = sent[vector_secrets.others(len(sent), _seed(order_key))]
  without = inversion.send(None, sent, noise_key)
  cases = {
    "own": (params, sent),
    "other": (params, other),
    "hidden": (decoders.hidden, without),
  }
  logs = {
    name: inversion.log_likelihoods(inverter, *case, tokens)
    for name, case in cases.items()
  }
  count = int(np.sum(np.asarray(tokens) > 0))
  perplexities = {
    name: math.exp(-np.sum(values) / count) for name, values in logs.items()
  }
  eos = inverter.model.token_ids.eos
  texts = [[_text(row, to_text, eos)] for row in tokens]

  def bleu(name: str) -> float:
    # Without the vector all texts are one.
    some = slice(1) if name == "hidden" else slice(None)
    parameters, given = cases[name]
    rows = inversion.write(
      inverter,
      parameters,
      given[some],
      max_length=tokens.shape[1],
    )
    written = [_text(row, to_text, eos) for row in rows]
    return text_measures.bleu(written * (len(texts) // len(written)), texts)

  def bits(name: str) -> intervals.Interval:
    gains = (logs[name] - logs["hidden"]) / math.log(2)
    return intervals.student(gains)

  return Reading(
    num_sentences=len(tokens),
    perplexity=perplexities["own"],
    perplexity_hidden=perplexities["hidden"],
    perplexity_other=perplexities["other"],
    bits=bits("own"),
    bits_other=bits("other"),
    bleu=bleu("own"),
    bleu_hidden=bleu("hidden"),
    bleu_other=bleu("other"),
  )


def read_secrets(
  decoders: Decoders,
  planted: vector_secrets.Planted,
  vectors: Float[np.ndarray, "secret candidate dim"],
  *,
  key: Key[Array, ""],
) -> SecretsRead:
  """Measures how well both attackers find planted secrets.

  Args:
    decoders: the trained attacker; the other one needs the noise alone.
    planted: from `vector_secrets.plant`.
    vectors: true vectors of `planted.rows`, by the clients' encoder.
    key: of the noise and of the order of the control.

  Returns:
    Shares and ranks of both, beside chance.
  """
  noise_key, order_key = jax.random.split(key)
  sent = inversion.send(decoders.noise, vectors[:, 0], noise_key)
  other = sent[vector_secrets.others(len(sent), _seed(order_key))]

  def likelihoods(sent: np.ndarray) -> np.ndarray:
    secrets, candidates, length = planted.rows.shape
    found = inversion.log_likelihoods(
      decoders.inverter,
      decoders.params,
      np.repeat(sent, candidates, axis=0),
      planted.rows.reshape(-1, length),
    )
    return found.reshape(secrets, candidates)

  def written(sent: np.ndarray) -> intervals.Interval:
    rows = inversion.write(
      decoders.inverter,
      decoders.params,
      sent,
      max_length=planted.rows.shape[-1],
    )
    found = vector_secrets.holds(rows, planted.secrets)
    return intervals.clopper_pearson(int(np.sum(found)), len(found))

  return SecretsRead(
    nearest=vector_secrets.recovery(vector_secrets.nearest(sent, vectors)),
    nearest_other=vector_secrets.recovery(
      vector_secrets.nearest(other, vectors)
    ),
    likelihood=vector_secrets.recovery(likelihoods(sent)),
    likelihood_other=vector_secrets.recovery(likelihoods(other)),
    written=written(sent),
    written_other=written(other),
  )


def _seed(key: Key[Array, ""]) -> list[int]:
  return np.asarray(jax.random.bits(key, (2,))).tolist()


def _text(
  row: Int[np.ndarray, " length"],
  to_text: Callable[[Sequence[int]], str],
  eos: int,
) -> str:
  """Returns the text of a row without EOS and padding."""
  return to_text([int(token) for token in row if token not in (0, eos)])
