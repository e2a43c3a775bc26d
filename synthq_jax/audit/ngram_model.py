"""An interpolated n-gram language model over token ids, counted with NumPy."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = ["NgramModel"]

_PAD_ID = 0
_CHUNK = 65_536
"""Sequences that are scored at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
  """Counts of what follows the contexts of one length."""

  contexts: Int[np.ndarray, " context"]
  """Ascending keys: the token furthest back, and the number of the rest."""
  totals: Int[np.ndarray, " context"]
  """How often each context was followed by anything."""
  types: Int[np.ndarray, " context"]
  """By how many different tokens."""
  ngrams: Int[np.ndarray, " ngram"]
  """Ascending keys: the number of the context, and the token that follows."""
  counts: Int[np.ndarray, " ngram"]
  """How often each stood there."""


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
    if order < 1:
      raise ValueError(f"expected order >= 1, got order={order}")
    text = _Text.make(tokens, vocab_size, order)
    targets = text.back(0)
    if not len(targets):
      raise ValueError(
        f"expected sequences with tokens, got none in shape"
        f" {text.is_token.shape}: nothing can be learnt from padding"
      )
    levels = []
    rows = np.zeros(len(targets), np.int64)
    for length in range(order):
      contexts = np.zeros(1, np.int64)
      if length:
        keys = _pairs(text.back(length), rows, len(levels[-1].contexts))
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
    text = _Text.make(tokens, self.vocab_size, len(self.levels))
    targets = text.back(0)
    probability = np.full(len(targets), 1 / (self.vocab_size - 1))
    rows = np.zeros(len(targets), np.int64)
    for length, level in enumerate(self.levels):
      if length:
        previous = len(self.levels[length - 1].contexts)
        keys = _pairs(text.back(length), rows, previous)
        # What has an unknown context has no longer known one.
        rows = np.where(rows < 0, -1, _find(level.contexts, keys))
      probability = _interpolated(
        level, rows, targets, probability, self.vocab_size
      )
    records = np.nonzero(text.is_token)[0]
    return np.bincount(records, np.log(probability), len(tokens))


class _Text(NamedTuple):
  """Sequences, and what stood before each of their tokens."""

  padded: Int[np.ndarray, "record longer"]
  """With padding before the first token, which says that a sequence starts."""
  is_token: Bool[np.ndarray, "record length"]

  @classmethod
  def make(cls, tokens: np.ndarray, vocab_size: int, order: int) -> "_Text":
    tokens = np.asarray(tokens)
    _check(tokens, vocab_size)
    padded = np.pad(tokens, ((0, 0), (order - 1, 0)))
    return cls(padded, tokens != _PAD_ID)

  def back(self, places: int) -> Int[np.ndarray, " token"]:
    """Returns what stands so many places before each token."""
    width = self.is_token.shape[1]
    start = self.padded.shape[1] - width - places
    window = self.padded[:, start : start + width]
    return window[self.is_token].astype(np.int64)


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


def _check(tokens: np.ndarray, vocab_size: int) -> None:
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
      "expected integer tokens [record, length], got shape"
      f" {tokens.shape} of {tokens.dtype}"
    )
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
      f"expected ids in [0, vocab_size={vocab_size}), got {tokens.min()} to"
      f" {tokens.max()}: give the size of the vocabulary that made them"
    )
  is_token = tokens != _PAD_ID
  if np.any(is_token[:, 1:] & ~is_token[:, :-1]):
    raise ValueError(
      "expected padding (0) behind the last token alone, got tokens behind it:"
      " shift them to the left"
    )


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
