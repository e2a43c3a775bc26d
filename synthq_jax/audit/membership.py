"""Membership scores of canaries: the higher, the more likely it was inserted.

Three attackers, by what they are given:

* the fine-tuned generator: `log_likelihoods` of a query given its document;
* the synthetic queries alone: `NgramModel`, an auxiliary model trained on them;
* a retriever trained on them: `retrieval.ranks.own_scores`, the similarity of a
  query and its document, which training on the pair or its echo raises.

Each knows the canaries' texts, which the auditor made up, and wants to know who
was inserted. Each has a reference that never saw a canary, such as the public
checkpoint the training started from: `calibrated` takes it out of the scores.

Formal guarantee: none. A score is computed from canaries that belong to the
private records, so it is as private as they are. High scores of inserted ones
show a leak; equal scores show that this attacker found none.

References:
  Meeus et al., "The Canary's Echo: Auditing Privacy Risks of LLM-Generated
  Synthetic Text", ICML 2025 (the model of the synthetic text as a score).
  Carlini et al., "Extracting Training Data from Large Language Models", USENIX
  Security 2021, section 5.2 (another model's likelihood as a reference).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from synthq_jax import checks, typing
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_config

__all__ = [
  "NgramModel",
  "calibrated",
  "in_batches",
  "log_likelihoods",
  "scored",
]

_CHUNK = 65_536
"""Sequences that the n-gram model scores at a time."""


def log_likelihoods(
  params: typing.Params,
  model_config: t5_config.T5Config,
  inputs: Int[np.ndarray, "record input"],
  targets: Int[np.ndarray, "record length"],
  *,
  batch_size: int = 256,
) -> Float[np.ndarray, " record"]:
  """Returns log P(query | document) under a T5, EOS included, in nats.

  The score of an attacker who has the generator's parameters, or its
  probabilities of given texts, and knows query and document of a canary.

  Formal guarantee: none; private, as the canaries are.

  Args:
    params: of `t5.Transformer`.
    model_config: its shape.
    inputs: tokens of documents as the generator reads them, prefix included;
      0 = padding.
    targets: tokens of queries; 0 = padding.
    batch_size: records scored at once; changes memory and speed only. The last
      batch is filled up, so that one shape is compiled.

  Returns:
    float64, at most 0.

  Raises:
    ValueError: if shapes disagree, an id is outside the vocabulary, a query has
      no token, or the model gives no finite number.
  """
  inputs, targets = np.asarray(inputs), np.asarray(targets)
  _check_records(inputs, targets, model_config.vocab_size)
  checks.at_least(1, batch_size=batch_size)
  params = jax.device_put(params)
  return scored(
    lambda rows: _score(
      params, inputs[rows], targets[rows], model_config=model_config
    ),
    len(targets),
    batch_size,
  )


def in_batches(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> np.ndarray:
  """Calls a function on rows in batches of one size, so that it compiles once.

  Args:
    function: from rows to one value for each; the last batch is filled up with
      its first row.
    total: of rows, at least 1.
    batch_size: rows at once, at least 1.

  Returns:
    The values of all rows, in order.
  """
  size, parts = min(batch_size, total), []
  for begin in range(0, total, size):
    rows = np.arange(begin, begin + size)
    parts.append(np.asarray(function(np.where(rows < total, rows, begin))))
  return np.concatenate(parts)[:total]


def scored(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> Float[np.ndarray, " record"]:
  """Returns the log-likelihoods of `in_batches` as float64.

  Raises:
    ValueError: if one is not finite.
  """
  values = in_batches(function, total, batch_size).astype(np.float64)
  if not np.isfinite(values).all():
    raise ValueError(
      "expected finite log-likelihoods, got others for"
      f" {np.sum(~np.isfinite(values))} of {total} records: look for a model"
      " that diverged, or train with a lower learning rate"
    )
  return values


def calibrated(
  scores: Float[np.ndarray, " record"],
  reference: Float[np.ndarray, " record"],
) -> Float[np.ndarray, " record"]:
  """Returns scores minus those of a reference that saw no canary.

  A canary that is likely anyway says nothing: short queries, common words and
  easy documents score high under every model, and vary far more than what one
  record adds. The reference gives each record its score had it not been there,
  and the difference is what training changed. The same difference fits all
  three attackers: of log-likelihoods it is a log-likelihood ratio.

  The attacker needs a public model of the same kind, for example the public
  checkpoint, the queries that it wrote, or its encoder. Without one, the mean
  score of a canary's other candidates serves as well.

  Formal guarantee: none; private, as the scores are.

  >>> calibrated(np.array([-2.0, -9.0]), np.array([-2.0, -12.0])).tolist()
  [0.0, 3.0]

  Args:
    scores: under what the canaries may have reached.
    reference: of the same records, in the same order, under what they cannot
      have reached.

  Returns:
    float64.

  Raises:
    ValueError: if the shapes are not those of two equal lists, or a value is
      not finite.
  """
  scores = np.asarray(scores, np.float64)
  reference = np.asarray(reference, np.float64)
  if scores.ndim != 1 or scores.shape != reference.shape:
    raise ValueError(
      "expected scores and reference [record] of the same records, got shapes"
      f" {scores.shape} and {reference.shape}"
    )
  for name, values in (("scores", scores), ("reference", reference)):
    wrong = np.sum(~np.isfinite(values))
    if wrong:
      raise ValueError(
        f"expected finite {name}, got {wrong} others of {len(values)}: look for"
        " a model that diverged"
      )
  return scores - reference


def _check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
      f"expected integer {name} [record, length], got shape {tokens.shape} of"
      f" {tokens.dtype}"
    )
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
      f"expected {name} in [0, vocab_size={vocab_size}), got {tokens.min()} to"
      f" {tokens.max()}: give the size of the vocabulary that made them"
    )


def _check_records(inputs, targets, vocab_size: int) -> None:
  _check_tokens("inputs", inputs, vocab_size)
  _check_tokens("targets", targets, vocab_size)
  if not 0 < len(targets) == len(inputs):
    raise ValueError(
      "expected inputs and targets of the same records, at least one, got"
      f" {len(inputs)} and {len(targets)}"
    )
  empty = np.sum(~np.any(targets != seq2seq.PADDING_ID, axis=1))
  if empty:
    raise ValueError(
      f"expected targets with tokens, got {empty} of padding alone: they would"
      " be certain under every model"
    )


@functools.partial(jax.jit, static_argnames=("model_config",))
def _score(
  params: typing.Params,
  inputs: Int[Array, "batch input"],
  targets: Int[Array, "batch length"],
  *,
  model_config: t5_config.T5Config,
) -> Float[Array, " batch"]:
  """Returns the log-likelihood of each query given its document."""
  model = t5.Transformer(model_config)
  logits = model.apply({"params": params}, inputs, t5.shift_right(targets))
  return -seq2seq.cross_entropy(logits, targets, normalization="sum")


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
  """Counts of what follows the contexts of one length."""

  # Keys ascend: of contexts, the token furthest back and the number of the
  # rest; of n-grams, the number of the context and the token that follows.
  contexts: Int[np.ndarray, " context"]
  totals: Int[np.ndarray, " context"]  # how often followed by anything
  types: Int[np.ndarray, " context"]  # by how many different tokens
  ngrams: Int[np.ndarray, " ngram"]
  counts: Int[np.ndarray, " ngram"]


@dataclasses.dataclass(frozen=True, eq=False)
class NgramModel:
  """A language model that knows a set of token sequences, and nothing else.

  The probability of a token is that of its n-gram, interpolated with those of
  ever shorter ones, down to the uniform distribution over all tokens but
  padding (Witten-Bell smoothing). It is a distribution after every context,
  known or not, so log-likelihoods are finite and comparable.

  The score of an attacker who has the synthetic queries and nothing else, and
  knows a canary's query: neither its document, nor the generator, nor how many
  queries were written for what. Calibrate it by a model fitted on queries that
  a public generator wrote for the same documents.

  Formal guarantee: none of its own. It is post-processing of what it is fitted
  on; what it says about private queries is private.

  >>> model = NgramModel.fit(np.array([[5, 6, 1], [5, 7, 1]]), vocab_size=9)
  >>> known, unknown = model.log_likelihoods(np.array([[5, 6, 1], [6, 5, 1]]))
  >>> bool(known > unknown)
  True

  References:
    Witten and Bell, "The Zero-Frequency Problem", IEEE Transactions on
    Information Theory 1991, method C.
    Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language
    Modeling", 1998, section 2.5 (the interpolated form).
  """

  vocab_size: int
  """Ids are below this; 0 is padding."""
  levels: tuple[_Level, ...]
  """One for each length of contexts, from 0 to order - 1."""

  @classmethod
  def fit(
    cls,
    tokens: Int[np.ndarray, "query length"],
    *,
    vocab_size: int,
    order: int = 5,
  ) -> "NgramModel":
    """Counts the n-grams of sequences.

    Args:
      tokens: ids, 0 = padding behind the last one. EOS counts as a token; the
        start of a sequence is a context.
      vocab_size: ids are below this.
      order: tokens of the longest n-grams, at least 1. Longer ones remember
        longer secrets word for word.

    Returns:
      The model; for 20,000 queries of 20 tokens in about a second.

    Raises:
      ValueError: if there is no token, or what is no id.
    """
    checks.at_least(1, order=order)
    tokens = _sequences(tokens, vocab_size)
    targets = _back(tokens, 0)
    if not len(targets):
      raise ValueError(
        f"expected sequences with tokens, got none in shape {tokens.shape}:"
        " nothing can be learnt from padding"
      )
    levels = []
    rows = np.zeros(len(targets), np.int64)
    for length in range(order):
      contexts = np.zeros(1, np.int64)
      if length:
        keys = _pairs(_back(tokens, length), rows, len(levels[-1].contexts))
        contexts, rows = np.unique(keys, return_inverse=True)
      ngrams, counts = np.unique(
        _pairs(rows, targets, vocab_size), return_counts=True
      )
      of = ngrams // vocab_size
      levels.append(
        _Level(
          contexts=contexts,
          totals=np.bincount(of, counts, len(contexts)).astype(np.int64),
          types=np.bincount(of, minlength=len(contexts)),
          ngrams=ngrams,
          counts=counts,
        )
      )
    return cls(vocab_size, tuple(levels))

  def log_likelihoods(
    self, tokens: Int[np.ndarray, "record length"]
  ) -> Float[np.ndarray, " record"]:
    """Returns the log-probability of each sequence, its EOS included, in nats.

    Args:
      tokens: ids, 0 = padding behind the last one.

    Returns:
      float64, at most 0, and 0 for a row of padding.

    Raises:
      ValueError: if there is what is no id.
    """
    tokens = np.asarray(tokens)
    parts = [np.zeros(0)]
    for start in range(0, len(tokens), _CHUNK):  # memory is bounded
      parts.append(self._of_chunk(tokens[start : start + _CHUNK]))
    return np.concatenate(parts)

  def _of_chunk(self, tokens: np.ndarray) -> Float[np.ndarray, " record"]:
    tokens = _sequences(tokens, self.vocab_size)
    targets = _back(tokens, 0)
    probability = np.full(len(targets), 1 / (self.vocab_size - 1))
    rows = np.zeros(len(targets), np.int64)
    for length, level in enumerate(self.levels):
      if length:
        previous = len(self.levels[length - 1].contexts)
        keys = _pairs(_back(tokens, length), rows, previous)
        # What has an unknown context has no longer known one.
        rows = np.where(rows < 0, -1, _find(level.contexts, keys))
      probability = _interpolated(
        level, rows, targets, probability, self.vocab_size
      )
    records = np.nonzero(tokens)[0]
    return np.bincount(records, np.log(probability), len(tokens))


def _back(tokens: np.ndarray, places: int) -> Int[np.ndarray, " token"]:
  """Returns what stands so many places before each token; 0 before the first."""
  width = tokens.shape[1]
  padded = np.pad(tokens, ((0, 0), (places, 0)))[:, :width]
  return padded[tokens != seq2seq.PADDING_ID].astype(np.int64)


def _interpolated(
  level: _Level,
  rows: Int[np.ndarray, " token"],
  targets: Int[np.ndarray, " token"],
  shorter: Float[np.ndarray, " token"],
  vocab_size: int,
) -> Float[np.ndarray, " token"]:
  """Returns (count + types x shorter) / (total + types), or `shorter`."""
  place = _find(level.ngrams, _pairs(rows, targets, vocab_size))
  count = np.where((rows >= 0) & (place >= 0), level.counts[place], 0)
  total, types = level.totals[rows], level.types[rows]
  return np.where(
    rows < 0, shorter, (count + types * shorter) / (total + types)
  )


def _sequences(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  tokens = np.asarray(tokens)
  _check_tokens("tokens", tokens, vocab_size)
  is_token = tokens != seq2seq.PADDING_ID
  if np.any(is_token[:, 1:] & ~is_token[:, :-1]):
    raise ValueError(
      "expected padding (0) behind the last token alone, got tokens behind it:"
      " shift them to the left"
    )
  return tokens


def _pairs(
  first: np.ndarray, second: np.ndarray, size: int
) -> Int[np.ndarray, " token"]:
  """Makes one number of two, the second below `size`."""
  return first * np.int64(size) + second


def _find(
  keys: Int[np.ndarray, " key"], wanted: Int[np.ndarray, " token"]
) -> Int[np.ndarray, " token"]:
  """Returns where each one stands among ascending keys, or -1."""
  place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[place] == wanted, place, -1)
