"""Canaries: made-up records with a random secret, half of them trained on.

A canary is a (query, document) pair of public text with a secret in one of the
two. The papers put digits into the document; a generator reads documents and
writes queries, so such a secret cannot come out of it, however well it was
learned. Each of their kinds therefore has a mirror image with the digits in the
query, and leaks are counted there. Two further kinds are easier to learn: tokens
that no text holds, and random words after an ordinary beginning.

A fair coin, thrown for each canary by itself, decides whether it joins the
private records; those that do not are the control group.

References:
  Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended
  Memorization in Neural Networks", USENIX Security 2019, sections 3 and 4.
  Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
  NeurIPS 2023, for the independent coins.
  Panda et al., "Privacy Auditing of Large Language Models", ICLR 2025, for new
  tokens.
  Meeus et al., "The Canary's Echo: Auditing Privacy Risks of LLM-Generated
  Synthetic Text", ICML 2025, for an ordinary beginning with a rare end.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from synthq_jax import checks
from synthq_jax.data import vocabulary as vocabulary_lib

__all__ = [
  "KINDS",
  "MIRRORED",
  "PAPERS",
  "Canary",
  "Kind",
  "Written",
  "alphabet",
  "alphabets",
  "make",
  "repeated",
  "tokenize",
]

_QUERY_WORDS = 8
_DOCUMENT_WORDS = 200
_WORDS_OF_SECRET = 4
_NEW_TOKENS_OF_SECRET = 3
_RUN = re.compile(r"[0-9](?:[\W_]*[0-9])*")
_SIGNS = re.compile(r"[\W_]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """What a canary looks like."""

  words: str
  """For people."""
  side: str
  """Where the secret stands: "query" or "document"."""
  symbols: str = "digits"
  """What it is made of: "digits", "words" or "new tokens"."""
  query: str = "own"
  """The words before it: "own", the beginning of the canary's document;
  "other", that of another; "none"."""
  document: bool = True
  """Whether the document has text besides a secret."""

  @property
  def can_leak(self) -> bool:
    """Whether a written query could tell the secret."""
    return self.side == "query" and self.symbols != "new tokens"


KINDS = {
  "digits_document": Kind(
    words="a random query, digits as its document",
    side="document",
    query="other", document=False,
  ),
  "own_document": Kind(
    words="a query, its document + digits", side="document"
  ),
  "other_document": Kind(
    words="a query, another document + digits", side="document", query="other",
  ),
  "digits_query": Kind(
    words="digits as the query, a random document", side="query", query="none",
  ),
  "own_query": Kind(words="a query + digits, its document", side="query"),
  "other_query": Kind(
    words="a query + digits, another document", side="query", query="other",
  ),
  "new_tokens": Kind(
    words="a query + tokens that no text holds, its document",
    side="query", symbols="new tokens",
  ),
  "rare_words": Kind(
    words="a query + random words, its document", side="query", symbols="words",
  ),
}  # fmt: skip
"""All kinds by name. A secret is drawn uniformly in each."""

PAPERS = ("digits_document", "own_document", "other_document")
"""The papers' three: digits in the document."""

MIRRORED = ("digits_query", "own_query", "other_query")
"""Their mirror images, in the same order: digits in the query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
  """A made-up record; private, like the coin that decided about it."""

  kind: str
  """One of `KINDS`."""
  document: str
  """Public text, without the secret."""
  query: str
  """Public text, without the secret."""
  secret: tuple[int, ...]
  """Ids of its symbols, drawn uniformly from `alphabet`."""
  spelled: str
  """The secret for people; digits stand without spaces."""
  repetitions: int
  """How often it stands in the private records if it does."""
  inserted: bool
  """Whether it belongs to the private training records."""


def make(
  texts: Sequence[str],
  vocabulary: vocabulary_lib.SentencePiece,
  *,
  number: int,
  kinds: Sequence[str] = tuple(KINDS),
  repetitions: Sequence[int] = (1, 10, 100),
  digits: int = 6,
  seed: int | Sequence[int],
) -> tuple[Canary, ...]:
  """Makes canaries with secrets and coins of their own.

  Args:
    texts: public documents, in any order; no two canaries share one while they
      last. Never a private query: it would stand in the data twice.
    vocabulary: of the generator.
    number: canaries of each kind and number of repetitions, trained on and
      held out together.
    kinds: of `KINDS`.
    repetitions: one group for each.
    digits: of a secret, 2 to 18.
    seed: of texts, secrets and coins; who knows it knows them all, so take it
      from the run's secret.

  Returns:
    `number` canaries for each kind and each number of repetitions.

  Raises:
    ValueError: if a number is out of range, a kind is unknown or the
      vocabulary has no symbols for it.
  """
  _check(texts, number, kinds, repetitions, digits)
  symbols = alphabets(kinds, vocabulary)
  lengths = {
    "digits": digits,
    "words": _WORDS_OF_SECRET,
    "new tokens": _NEW_TOKENS_OF_SECRET,
  }
  rng = np.random.default_rng(seed)
  order = rng.permutation(len(texts))
  place = itertools.count()
  made = []
  for kind, times in itertools.product(kinds, repetitions):
    length = lengths[KINDS[kind].symbols]
    for _ in range(number):
      own, other = (texts[order[next(place) % len(texts)]] for _ in range(2))
      secret = tuple(rng.choice(symbols[kind], length).tolist())
      made.append(
        Canary(
          kind=kind,
          document=_head(own, _DOCUMENT_WORDS) if KINDS[kind].document else "",
          query=_query(KINDS[kind], own, other),
          secret=secret,
          spelled=_spelled(KINDS[kind].symbols, secret, vocabulary),
          repetitions=times,
          inserted=bool(rng.integers(2)),
        )
      )
  return tuple(made)


def alphabets(
  kinds: Iterable[str], vocabulary: vocabulary_lib.SentencePiece
) -> dict[str, Int[np.ndarray, " symbol"]]:
  """Returns the alphabet of each kind; each is looked for once.

  Args:
    kinds: of `KINDS`, repeated or not.
    vocabulary: of the generator.

  Raises:
    ValueError: as for `alphabet`.
  """
  symbols = {kind: KINDS[kind].symbols for kind in kinds}
  found = {
    name: alphabet(name, vocabulary) for name in dict.fromkeys(symbols.values())
  }
  return {kind: found[name] for kind, name in symbols.items()}


def alphabet(
  symbols: str, vocabulary: vocabulary_lib.SentencePiece
) -> Int[np.ndarray, " symbol"]:
  """Returns the ids a secret is made of, each one token of the vocabulary.

  Args:
    symbols: "digits", "words" (whole words of letters, three at least) or "new
      tokens" (the sentinels, which fine-tuning has no other use for).
    vocabulary: of the generator.

  Raises:
    ValueError: if there are too few: no digits, or no sentinels.
  """
  end = vocabulary.vocab_size - vocabulary.extra_ids
  if symbols == "new tokens":
    found = range(end, vocabulary.vocab_size)
  elif symbols == "digits":
    # T5's own writes "0" as a space and a digit: the last token is the digit.
    ends = {
      str(digit): vocabulary.encode(str(digit))[-1] for digit in range(10)
    }
    found = {i for digit, i in ends.items() if vocabulary.decode([i]) == digit}
  else:
    found = [i for i in range(end) if _is_word(vocabulary, i)]
  least = 10
  if len(found) < least:
    raise ValueError(
      f"expected a vocabulary with at least {least} {symbols} that are one"
      f" token each, got {len(found)}: leave the kinds of canaries made of"
      f" {symbols} out of Canaries.kinds"
    )
  return np.array(sorted(found), np.int32)


def repeated(canaries: Sequence[Canary]) -> Int[np.ndarray, " record"]:
  """Returns the rows of the inserted canaries, as often as each stands there.

  Formal guarantee: each repetition is a record of its own and counts in n. A
  claim of epsilon is about one record; about a canary that stands there k
  times only the claim for groups of k holds (`statement.group`).

  Args:
    canaries: from `make`.

  Returns:
    Positions in `canaries`, repetitions next to each other.
  """
  times = [c.repetitions if c.inserted else 0 for c in canaries]
  return np.repeat(np.arange(len(canaries)), times)


def tokenize(
  canaries: Sequence[Canary],
  vocabulary: vocabulary_lib.SentencePiece,
  *,
  prefix: str,
  document_length: int,
  query_length: int,
) -> dict[str, Int[np.ndarray, "canary length"]]:
  """Turns canaries into records as fine-tuning reads them.

  Text is cut where it is too long, a secret never is; it stands last.

  Args:
    canaries: from `make`.
    vocabulary: of the generator.
    prefix: stands before each document, and is not counted in its length.
    document_length: tokens of a document, EOS included.
    query_length: tokens of a query, EOS included.

  Returns:
    "inputs" [canary, prefix + document_length] and "targets"
    [canary, query_length].

  Raises:
    ValueError: if a secret does not fit.
  """
  head = vocabulary.encode(prefix) if prefix else []
  sides = {"document": document_length, "query": query_length}
  rows = {
    side: np.stack([_row(c, side, vocabulary, length) for c in canaries])
    for side, length in sides.items()
  }
  head = np.broadcast_to(np.array(head, np.int32), (len(canaries), len(head)))
  return {
    "inputs": np.concatenate([head, rows["document"]], axis=1),
    "targets": rows["query"],
  }


@dataclasses.dataclass(frozen=True)
class Written:
  """Texts, prepared once for the search of many secrets."""

  digits: str
  """Digits between which nothing but spaces and signs stands, run by run."""
  words: str
  """Words with one space between them, text by text."""

  @classmethod
  def of(cls, texts: Iterable[str]) -> "Written":
    """Reads texts, each by itself: no secret goes on in the next.

    Args:
      texts: read once.
    """
    digits, words = [], []
    for text in texts:
      found = _RUN.findall(text)
      digits += [_SIGNS.sub("", run) for run in found]
      words.append(" ".join(text.split()))
    return cls("\n".join(digits), " " + " \n ".join(words) + " ")

  def tell(self, canary: Canary) -> bool:
    """Says whether a text tells the secret, however its symbols are spaced.

    False for new tokens, which no text can tell.

    >>> canary = Canary(
    ...     kind="own_query", document="", query="", secret=(5, 4), spelled="21",
    ...     repetitions=1, inserted=True)
    >>> [Written.of([t]).tell(canary) for t in ("code: 2-1", "code: 2 of 1")]
    [True, False]
    """
    symbols = KINDS[canary.kind].symbols
    if symbols == "new tokens":
      return False
    if symbols == "words":
      return f" {canary.spelled} " in self.words
    return canary.spelled in self.digits


def _check(texts, number, kinds, repetitions, digits) -> None:
  unknown = [kind for kind in kinds if kind not in KINDS]
  if unknown or not kinds:
    raise ValueError(
      f"expected kinds of {', '.join(KINDS)}, got kinds={tuple(kinds)}"
    )
  checks.at_least(1, number=number, repetitions=min(repetitions, default=0))
  checks.within("[2, 18]", digits=digits)
  if len(texts) < 2:
    raise ValueError(
      f"expected at least 2 public documents, got {len(texts)}: canaries are"
      " made of them"
    )


def _query(kind: Kind, own: str, other: str) -> str:
  """Returns the words before the secret: the beginning of a public text."""
  if kind.query == "none":
    return ""
  return _head(other if kind.query == "other" else own, _QUERY_WORDS)


def _head(text: str, words: int) -> str:
  return " ".join(text.split()[:words])


def _is_word(vocabulary: vocabulary_lib.SentencePiece, token: int) -> bool:
  """Says whether an id is a whole word that is read as that id again."""
  text = vocabulary.decode([token])
  return len(text) > 2 and text.isalpha() and vocabulary.encode(text) == [token]


def _spelled(symbols: str, secret: Sequence[int], vocabulary) -> str:
  if symbols == "new tokens":
    return " ".join(f"<{token}>" for token in secret)
  parts = [vocabulary.decode([token]) for token in secret]
  return (" " if symbols == "words" else "").join(parts)


def _row(canary: Canary, side: str, vocabulary, length: int) -> np.ndarray:
  """Returns text, secret and EOS of one side, cut and padded to `length`."""
  secret = canary.secret if KINDS[canary.kind].side == side else ()
  room = length - 1 - len(secret)
  if room < 0:
    raise ValueError(
      f"expected secrets that fit {side}_length={length} with EOS, got one of"
      f" {len(secret)} tokens: take fewer digits or a greater {side}_length"
    )
  text = canary.query if side == "query" else canary.document
  head = vocabulary.encode(text)[:room] if text else []
  row = [*head, *secret, vocabulary.eos_id]
  return vocabulary_lib.pad([row], length)[0]
