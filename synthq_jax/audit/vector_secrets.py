"""Secrets in sentences whose vectors are sent: planted, ranked, read out.

A planted sentence is the beginning of a text and a random secret, as in
`canaries`; its vector is sent as the client's others are. Two attackers who
know all but the secret rank it among candidates that could have been it just as
well:

* `nearest`: encodes the sentence with each candidate and takes the one whose
  vector is nearest to what was sent. It needs no training. For vectors of equal
  length with Gaussian noise no attacker names the right candidate more often:
  the nearest vector is the likeliest one.
* the trained decoder of `inversion`: by the likelihood that it gives each
  candidate. It can be no better, but works where nobody holds candidates; then
  `holds` says whether the secret stands in what it wrote.

The control of both is the vector of another planted sentence. The secrets are
independent of it, so the true one ranks as any other: chance by construction.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from synthq_jax import checks, intervals
from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.audit import candidates as candidates_lib
from synthq_jax.audit import exposure
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = [
  "Planted",
  "Recovery",
  "holds",
  "nearest",
  "others",
  "plant",
  "recovery",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
  """Sentences with secrets; private, like the client's own."""

  rows: Int[np.ndarray, "secret candidate length"]
  """Each sentence with each of its candidates; the true secret in column 0."""
  secrets: tuple[tuple[int, ...], ...]
  """The true secrets' symbols, one secret a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
  """How well an attacker ranks secrets among their candidates."""

  num_secrets: int
  """Sentences with a secret each."""
  num_candidates: int
  """Candidates of each, the secret included; 1 over them is chance."""
  first: intervals.Interval
  """Share of secrets that rank first (Clopper and Pearson's interval)."""
  mean_rank: intervals.Interval
  """Of the secrets; (num_candidates + 1) / 2 is chance."""


def plant(
  canaries: Sequence[canaries_lib.Canary],
  vocabulary: vocabulary_lib.SentencePiece,
  *,
  length: int,
  num_candidates: int,
  seed: int | Sequence[int],
) -> Planted:
  """Makes sentences out of canaries with the secret in the query.

  The canary's query with its secret is the sentence; coins and documents do not
  matter here.

  Args:
    canaries: from `canaries.make`.
    vocabulary: of the encoder.
    length: tokens of a sentence, EOS included.
    num_candidates: secrets that are ranked, the true one included.
    seed: draws the candidates.

  Returns:
    A sentence for each canary.

  Raises:
    ValueError: if a canary has its secret in the document, a secret does not
      fit, or there are not so many candidates.
  """
  wrong = {
    c.kind for c in canaries if canaries_lib.KINDS[c.kind].side != "query"
  }
  if wrong or not canaries:
    raise ValueError(
      "expected canaries with the secret in the query, at least one, got kinds"
      f" {sorted(wrong)}: make them with kinds=('own_query',)"
    )
  rng = np.random.default_rng(seed)
  alphabets = canaries_lib.alphabets({c.kind for c in canaries}, vocabulary)
  sides = canaries_lib.tokenize(
    canaries, vocabulary, prefix="", document_length=1, query_length=length
  )
  rows = []
  for canary, row in zip(canaries, sides["targets"], strict=True):
    drawn = candidates_lib.draw(
      canary, alphabets[canary.kind], num_candidates, rng
    )
    rows.append(
      candidates_lib.with_secrets(row, len(canary.secret), drawn.secrets)
    )
  return Planted(
    rows=np.stack(rows), secrets=tuple(canary.secret for canary in canaries)
  )


def nearest(
  sent: Float[np.ndarray, "secret dim"],
  candidates: Float[np.ndarray, "secret candidate dim"],
) -> Float[np.ndarray, "secret candidate"]:
  """Scores candidates by how near their vectors are to what was sent.

  Formal guarantee: if what is sent is the true vector with Gaussian noise of
  one standard deviation on each coordinate, and the secret is uniform over its
  candidates, then no function of what is sent has the secret rank first more
  often. It holds for a scaled vector, too, where candidates have one length,
  as unit vectors do: then the order is that of dot products.

  Args:
    sent: what was sent for each planted sentence.
    candidates: true vectors of each candidate; the secret's in column 0.

  Returns:
    Minus the squared distances, for `recovery`.

  Raises:
    ValueError: if the shapes do not belong together.
  """
  sent = np.asarray(sent, np.float64)
  candidates = np.asarray(candidates, np.float64)
  if candidates.ndim != 3 or sent.shape != candidates.shape[::2]:
    raise ValueError(
      "expected sent [secret, dim] and candidates [secret, candidate, dim], got"
      f" shapes {sent.shape} and {candidates.shape}"
    )
  return -np.sum((sent[:, None, :] - candidates) ** 2, axis=-1)


def recovery(scores: Float[np.ndarray, "secret candidate"]) -> Recovery:
  """Sums up the ranks of the secrets.

  The intervals, of 95%, hold for secrets drawn independently of each other and
  of the attacker, as planted ones are.

  >>> found = recovery(np.array([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]))
  >>> found.first.mean, found.mean_rank.mean
  (0.5, 2.0)

  Args:
    scores: of each secret's candidates, the higher the likelier; the true
      secret in column 0.

  Returns:
    Shares and ranks; as private as the secrets.

  Raises:
    ValueError: if the scores are no matrix of numbers with two columns or more.
  """
  ranks = exposure.ranks(scores)
  num_candidates = np.shape(scores)[1]
  return Recovery(
    num_secrets=len(ranks),
    num_candidates=num_candidates,
    first=intervals.clopper_pearson(int(np.sum(ranks == 1)), len(ranks)),
    mean_rank=exposure.mean_rank(ranks, num_candidates),
  )


def holds(
  written: Int[np.ndarray, "row length"], secrets: Sequence[Sequence[int]]
) -> Bool[np.ndarray, " row"]:
  """Says whether each secret stands, whole and in order, in its own row.

  >>> holds(np.array([[7, 3, 4, 1], [7, 4, 3, 1]]), [(3, 4), (3, 4)]).tolist()
  [True, False]

  Args:
    written: tokens that an attacker wrote, a row for each secret.
    secrets: their symbols.
  """
  found = []
  for row, secret in zip(np.asarray(written), secrets, strict=True):
    length = len(secret)
    if length > len(row):
      found.append(False)
      continue
    windows = np.lib.stride_tricks.sliding_window_view(row, length)
    found.append(bool(np.any(np.all(windows == np.array(secret), axis=1))))
  return np.array(found, bool)


def others(number: int, seed: int | Sequence[int]) -> Int[np.ndarray, " row"]:
  """Returns for each row another one, each once: whose vector is the control.

  >>> sorted(others(4, 0).tolist())
  [0, 1, 2, 3]

  Args:
    number: of rows, at least 2.
    seed: of the order.

  Raises:
    ValueError: if there is no other row.
  """
  checks.at_least(2, number=number)
  circle = np.random.default_rng(seed).permutation(number)
  found = np.empty(number, np.int64)
  found[circle] = np.roll(circle, 1)  # one circle: no row keeps its own
  return found
