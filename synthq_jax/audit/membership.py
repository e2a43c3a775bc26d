"""Membership scores of canaries: a high score suggests an inserted canary.

Three attackers have access to different things:

* the fine-tuned generator: `log_likelihoods` of a query given its document;
* only the synthetic queries: `NgramModel`, an auxiliary model trained on them;
* a retriever trained on them: `similarities`, the similarity of a
  query and its document. Training on the pair or its echo raises it.

Each attacker knows the canaries' texts, which the auditor wrote, and guesses
which canaries were inserted. Each has a reference that never saw a canary, such
as the public checkpoint that the training started from. `calibrated` subtracts
the reference's scores.

Formal guarantee: none. A score is computed from canaries that belong to the
private records, so it is as private as they are. Higher scores of inserted
canaries show a leak; equal scores show that this attacker found none.

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
  "apply_in_batches",
  "log_likelihoods",
  "score_in_batches",
  "similarities",
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

  This is the score of an attacker who has the generator's parameters, or its
  probabilities of texts, and knows a canary's query and document.

  Formal guarantee: none; private, as the canaries are.

  Args:
    params: parameters of `t5.Transformer`.
    model_config: configuration of the model.
    inputs: tokens of documents as the generator reads them, prefix included;
      0 = padding.
    targets: tokens of queries; 0 = padding.
    batch_size: records scored at once; changes memory and speed only. The last
      batch is filled up, so that one shape is compiled.

  Returns:
    Log-likelihoods in float64, at most 0.

  Raises:
    ValueError: if shapes disagree, an id is outside the vocabulary, a query has
      no token, or the model gives a number that is not finite.
  """
  inputs, targets = np.asarray(inputs), np.asarray(targets)
  _check_records(inputs, targets, model_config.vocab_size)
  checks.at_least(1, batch_size=batch_size)
  params = jax.device_put(params)
  return score_in_batches(
    lambda rows: _score(
      params, inputs[rows], targets[rows], model_config=model_config
    ),
    len(targets),
    batch_size,
  )


def apply_in_batches(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> np.ndarray:
  """Calls a function on batches of rows of one size, so that it compiles once.

  Args:
    function: function from positions of rows to one value for each. The last
      batch is filled up with its first row.
    total: number of rows, at least 1.
    batch_size: rows at once, at least 1.

  Returns:
    The values of all rows, in order.
  """
  size, parts = min(batch_size, total), []
  for begin in range(0, total, size):
    rows = np.arange(begin, begin + size)
    parts.append(np.asarray(function(np.where(rows < total, rows, begin))))
  return np.concatenate(parts)[:total]


def score_in_batches(
  function: Callable[[Int[np.ndarray, " batch"]], Array],
  total: int,
  batch_size: int,
) -> Float[np.ndarray, " record"]:
  """Calls `apply_in_batches` and returns the log-likelihoods in float64.

  Raises:
    ValueError: if one is not finite.
  """
  values = apply_in_batches(function, total, batch_size).astype(np.float64)
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
  """Subtracts the scores of a reference that saw no canary.

  Short queries, common words and easy documents score high under every model.
  Such differences are far larger than the effect of one record. The reference
  estimates the score of each record without training on it, so the difference
  is the effect of training. The same difference serves all three attackers; for
  log-likelihoods it is a log-likelihood ratio.

  The attacker needs a public model of the same kind, for example the public
  checkpoint, the queries that it wrote, or its encoder. Without one, the mean
  score of a canary's other candidates serves as well.

  Formal guarantee: none; private, as the scores are.

  >>> calibrated(np.array([-2.0, -9.0]), np.array([-2.0, -12.0])).tolist()
  [0.0, 3.0]

  Args:
    scores: scores of records under the attacked model.
    reference: scores of the same records, in the same order, under a model that
      cannot depend on the canaries.

  Returns:
    Differences in float64.

  Raises:
    ValueError: if the arrays are not two vectors of one length, or a value is
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
      f" {tokens.max()}: give the size of the vocabulary that encoded them"
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
      f"expected targets with tokens, got {empty} of padding alone: leave them"
      " out, every model gives them probability 1"
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
  """Counts of the tokens that follow the contexts of one length."""

  # Keys ascend. A context's key joins its earliest token and the position of the
  # shorter context; an n-gram's key joins its context's position and last token.
  contexts: Int[np.ndarray, " context"]
  totals: Int[np.ndarray, " context"]  # tokens that follow
  types: Int[np.ndarray, " context"]  # different tokens that follow
  ngrams: Int[np.ndarray, " ngram"]
  counts: Int[np.ndarray, " ngram"]


@dataclasses.dataclass(frozen=True, eq=False)
class NgramModel:
  """An n-gram language model, fitted on a set of token sequences alone.

  The model interpolates the probability of an n-gram with the probabilities of
  ever shorter n-grams (Witten-Bell smoothing). The shortest is the uniform
  distribution over all tokens except padding. Every context, seen or not, has a
  distribution, so log-likelihoods are finite and comparable.

  Its log-likelihood is the score of an attacker who has only the synthetic
  queries and knows a canary's query. This attacker knows neither the document,
  nor the generator, nor the number of queries for each document. Calibrate the
  score with a model fitted on a public generator's queries for the same
  documents.

  Formal guarantee: none of its own. The model is post-processing of the
  sequences it is fitted on; its scores of private queries are private.

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
  """Counts for each length of contexts, from 0 to order - 1."""

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
      The model. Fitting 20,000 queries of 20 tokens takes about a second.

    Raises:
      ValueError: if there is no token, or a value is no id.
    """
    checks.at_least(1, order=order)
    tokens = _check_sequences(tokens, vocab_size)
    targets = _get_previous(tokens, 0)
    if not len(targets):
      raise ValueError(
        f"expected sequences with tokens, got none in shape {tokens.shape}:"
        " look for queries that are all empty"
      )
    levels = []
    rows = np.zeros(len(targets), np.int64)
    for length in range(order):
      contexts = np.zeros(1, np.int64)
      if length:
        keys = _encode_pairs(
          _get_previous(tokens, length), rows, len(levels[-1].contexts)
        )
        contexts, rows = np.unique(keys, return_inverse=True)
      ngrams, counts = np.unique(
        _encode_pairs(rows, targets, vocab_size), return_counts=True
      )
      owners = ngrams // vocab_size
      levels.append(
        _Level(
          contexts=contexts,
          totals=np.bincount(owners, counts, len(contexts)).astype(np.int64),
          types=np.bincount(owners, minlength=len(contexts)),
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
      Log-probabilities in float64, at most 0; 0 for a row of padding.

    Raises:
      ValueError: if a value is no id.
    """
    tokens = np.asarray(tokens)
    parts = [np.zeros(0)]
    for start in range(0, len(tokens), _CHUNK):  # memory is bounded
      parts.append(self._score_chunk(tokens[start : start + _CHUNK]))
    return np.concatenate(parts)

  def _score_chunk(self, tokens: np.ndarray) -> Float[np.ndarray, " record"]:
    tokens = _check_sequences(tokens, self.vocab_size)
    targets = _get_previous(tokens, 0)
    probability = np.full(len(targets), 1 / (self.vocab_size - 1))
    rows = np.zeros(len(targets), np.int64)
    for length, level in enumerate(self.levels):
      if length:
        previous = len(self.levels[length - 1].contexts)
        keys = _encode_pairs(_get_previous(tokens, length), rows, previous)
        # A token whose context is unknown has no known longer context either.
        rows = np.where(rows < 0, -1, _find_positions(level.contexts, keys))
      probability = _interpolate(
        level, rows, targets, probability, self.vocab_size
      )
    records = np.nonzero(tokens)[0]
    return np.bincount(records, np.log(probability), len(tokens))


def _get_previous(
  tokens: np.ndarray, distance: int
) -> Int[np.ndarray, " token"]:
  """Returns the id `distance` tokens before each token; 0 before the first."""
  width = tokens.shape[1]
  padded = np.pad(tokens, ((0, 0), (distance, 0)))[:, :width]
  return padded[tokens != seq2seq.PADDING_ID].astype(np.int64)


def _interpolate(
  level: _Level,
  rows: Int[np.ndarray, " token"],
  targets: Int[np.ndarray, " token"],
  shorter: Float[np.ndarray, " token"],
  vocab_size: int,
) -> Float[np.ndarray, " token"]:
  """Returns (count + types x shorter) / (total + types), or `shorter`."""
  positions = _find_positions(
    level.ngrams, _encode_pairs(rows, targets, vocab_size)
  )
  count = np.where((rows >= 0) & (positions >= 0), level.counts[positions], 0)
  total, types = level.totals[rows], level.types[rows]
  return np.where(
    rows < 0, shorter, (count + types * shorter) / (total + types)
  )


def _check_sequences(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  tokens = np.asarray(tokens)
  _check_tokens("tokens", tokens, vocab_size)
  is_token = tokens != seq2seq.PADDING_ID
  if np.any(is_token[:, 1:] & ~is_token[:, :-1]):
    raise ValueError(
      "expected padding (0) behind the last token alone, got tokens behind it:"
      " shift them to the left"
    )
  return tokens


def _encode_pairs(
  first: np.ndarray, second: np.ndarray, size: int
) -> Int[np.ndarray, " token"]:
  """Encodes pairs of numbers as one number each; the second is below `size`."""
  return first * np.int64(size) + second


def _find_positions(
  keys: Int[np.ndarray, " key"], values: Int[np.ndarray, " token"]
) -> Int[np.ndarray, " token"]:
  """Returns the position of each value among ascending keys, or -1."""
  positions = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
  return np.where(keys[positions] == values, positions, -1)


def similarities(
  queries: Float[np.ndarray, "record dim"],
  documents: Float[np.ndarray, "record dim"],
) -> Float[np.ndarray, " record"]:
  """Computes the inner product of each record's query and document, in float64.

  Args:
    queries: vectors.
    documents: one vector for each query.

  Raises:
    ValueError: if shapes differ or a vector is not finite.
  """
  sides = [np.asarray(side, np.float64) for side in (queries, documents)]
  if sides[0].shape != sides[1].shape or not np.isfinite(sides).all():
    raise ValueError(
      "expected one finite vector for each query and document, got shapes"
      f" {sides[0].shape} and {sides[1].shape}: look at the encoder's training"
    )
  return np.einsum("rd,rd->r", *sides)
