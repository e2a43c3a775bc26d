"""Canaries: artificial records with a random secret, half of them trained on.

A canary is a (query, document) pair of public text with a secret in one of the
two. The papers put digits into the document. A generator reads documents and
writes queries, so it cannot write such a secret, however well it has learned it.
Each of the papers' kinds therefore has a mirror image with the digits in the
query, and leaks are counted there. Two more kinds are easier to learn: tokens
that no text holds, and random words after an ordinary beginning.

An independent fair coin decides for each canary whether it joins the private
records; the canaries that do not join are the control group.

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
  """The layout of a canary."""

  words: str
  """Description for readers of a report."""
  side: str
  """Side that holds the secret: "query" or "document"."""
  symbols: str = "digits"
  """Alphabet of the secret: "digits", "words" or "new tokens"."""
  query: str = "own"
  """Text of the query without the secret: "own", the beginning of the canary's
  document; "other", the beginning of another document; "none"."""
  document: bool = True
  """Whether the document has text besides a secret."""

  @property
  def can_leak(self) -> bool:
    """Whether a synthetic query could reveal the secret."""
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
"""All kinds by name. Each draws its secrets uniformly."""

PAPERS = ("digits_document", "own_document", "other_document")
"""The papers' three kinds, with digits in the document."""

MIRRORED = ("digits_query", "own_query", "other_query")
"""Mirror images of `PAPERS`, in the same order, with digits in the query."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
  """An artificial record; private, like the coin that decided whether it joins."""

  kind: str
  """One of `KINDS`."""
  document: str
  """Public text, without the secret."""
  query: str
  """Public text, without the secret."""
  secret: tuple[int, ...]
  """Ids of its symbols, drawn uniformly from `alphabet`."""
  spelled: str
  """The secret as text; digits have no spaces between them."""
  repetitions: int
  """Copies among the private records if the canary is inserted."""
  inserted: bool
  """Whether the canary belongs to the private training records."""


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
  """Makes canaries, each with an independent secret and coin.

  Args:
    texts: public documents, in any order. Two canaries share one only if there
      are too few. Never a private query: the data would hold it twice.
    vocabulary: vocabulary of the generator.
    number: canaries of each kind and number of repetitions, inserted and
      held-out ones together.
    kinds: names of `KINDS`.
    repetitions: numbers of copies; each makes a group of canaries.
    digits: digits of a secret, 2 to 18.
    seed: seed of texts, secrets and coins. Anyone who knows it knows them all,
      so take it from the run's secret.

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
  next_text = itertools.count()
  canaries = []
  for kind, times in itertools.product(kinds, repetitions):
    length = lengths[KINDS[kind].symbols]
    for _ in range(number):
      own, other = (
        texts[order[next(next_text) % len(texts)]] for _ in range(2)
      )
      secret = tuple(rng.choice(symbols[kind], length).tolist())
      canaries.append(
        Canary(
          kind=kind,
          document=_cut_text(own, _DOCUMENT_WORDS)
          if KINDS[kind].document
          else "",
          query=_make_query(KINDS[kind], own, other),
          secret=secret,
          spelled=_spell(KINDS[kind].symbols, secret, vocabulary),
          repetitions=times,
          inserted=bool(rng.integers(2)),
        )
      )
  return tuple(canaries)


def alphabets(
  kinds: Iterable[str], vocabulary: vocabulary_lib.SentencePiece
) -> dict[str, Int[np.ndarray, " symbol"]]:
  """Returns the alphabet of each kind, and computes each alphabet once.

  Args:
    kinds: names of `KINDS`; duplicates are allowed.
    vocabulary: vocabulary of the generator.

  Raises:
    ValueError: as for `alphabet`.
  """
  symbols = {kind: KINDS[kind].symbols for kind in kinds}
  ids_by_symbols = {
    name: alphabet(name, vocabulary) for name in dict.fromkeys(symbols.values())
  }
  return {kind: ids_by_symbols[name] for kind, name in symbols.items()}


def alphabet(
  symbols: str, vocabulary: vocabulary_lib.SentencePiece
) -> Int[np.ndarray, " symbol"]:
  """Returns the token ids that a secret may consist of.

  Args:
    symbols: "digits", "words" (whole words of at least three letters) or "new
      tokens" (the sentinels, which fine-tuning has no other use for).
    vocabulary: vocabulary of the generator.

  Raises:
    ValueError: if the vocabulary has fewer than 10 of them, for example no
      sentinels.
  """
  end = vocabulary.vocab_size - vocabulary.extra_ids
  if symbols == "new tokens":
    ids = range(end, vocabulary.vocab_size)
  elif symbols == "digits":
    # T5's vocabulary encodes "0" as a space and a digit: take the last token.
    ends = {
      str(digit): vocabulary.encode(str(digit))[-1] for digit in range(10)
    }
    ids = {i for digit, i in ends.items() if vocabulary.decode([i]) == digit}
  else:
    ids = [i for i in range(end) if _is_word(vocabulary, i)]
  least = 10
  if len(ids) < least:
    raise ValueError(
      f"expected a vocabulary with at least {least} {symbols} that are one"
      f" token each, got {len(ids)}: leave the kinds of canaries with"
      f" {symbols} as secrets out of Canaries.kinds"
    )
  return np.array(sorted(ids), np.int32)


def repeated(canaries: Sequence[Canary]) -> Int[np.ndarray, " record"]:
  """Returns the rows of the inserted canaries, each repeated `repetitions` times.

  Formal guarantee: each repetition is a record of its own and counts in n. A
  claim of epsilon is about one record. For a canary with k repetitions, only
  the claim for groups of k records holds (`statement.group`).

  Args:
    canaries: canaries from `make`.

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
  """Tokenizes canaries into records for fine-tuning.

  Long text is cut, a secret never is: it comes last, before EOS.

  Args:
    canaries: canaries from `make`.
    vocabulary: vocabulary of the generator.
    prefix: text before each document; its tokens do not count in
      `document_length`.
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
    side: np.stack([_make_row(c, side, vocabulary, length) for c in canaries])
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
  """Runs of digits, a line for each; spaces and signs within a run are left
  out."""
  words: str
  """Words with one space between them; newlines separate the texts."""

  @classmethod
  def of(cls, texts: Iterable[str]) -> "Written":
    """Prepares texts. A secret that spans two texts is not found.

    Args:
      texts: texts, read once.
    """
    digits, words = [], []
    for text in texts:
      runs = _RUN.findall(text)
      digits += [_SIGNS.sub("", run) for run in runs]
      words.append(" ".join(text.split()))
    return cls("\n".join(digits), " " + " \n ".join(words) + " ")

  def tell(self, canary: Canary) -> bool:
    """Searches the texts for a canary's secret, however its symbols are spaced.

    False for new tokens, which no text can hold.

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
      f"expected at least 2 public documents, got {len(texts)}: canaries consist"
      " of their text"
    )


def _make_query(kind: Kind, own: str, other: str) -> str:
  """Returns a query without its secret: the beginning of a public text."""
  if kind.query == "none":
    return ""
  return _cut_text(other if kind.query == "other" else own, _QUERY_WORDS)


def _cut_text(text: str, words: int) -> str:
  return " ".join(text.split()[:words])


def _is_word(vocabulary: vocabulary_lib.SentencePiece, token: int) -> bool:
  """Checks that an id is a whole word that encodes to this id again."""
  text = vocabulary.decode([token])
  return len(text) > 2 and text.isalpha() and vocabulary.encode(text) == [token]


def _spell(symbols: str, secret: Sequence[int], vocabulary) -> str:
  if symbols == "new tokens":
    return " ".join(f"<{token}>" for token in secret)
  parts = [vocabulary.decode([token]) for token in secret]
  return (" " if symbols == "words" else "").join(parts)


def _make_row(canary: Canary, side: str, vocabulary, length: int) -> np.ndarray:
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
