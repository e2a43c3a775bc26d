"""Public text for pre-training: records without what is held out.

What strangers wrote repeats private queries word for word now and then, and a
checkpoint that has read a test set says nothing about privacy. So every
sentence with 8 words of a held-out query in a row is dropped and counted.
"""

import collections
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence

from synthq_jax.data import (
  docstrings,
  open_text,
  pretrain_tasks,
  rule_questions,
)

__all__ = [
  "HeldOut",
  "grams",
  "passages",
  "records",
  "repeated",
  "split_sentences",
]

_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'])")
_SIGNATURE = re.compile(r"\w\(.*\)|->|::|[={}\\]|^\W")
_LATIN = re.compile(r"^[\x00-\x7f\u00e0-\u00ff\u2010-\u2026]*$")
_SHORT, _PASSAGE_WORDS = 40, 30
_WORDS = {  # of a title, from and to
  "heading": (1, 12),
  "question": (3, 25),
  "rule": (3, 25),
  "summary": (3, 30),
}
_NGRAM = 8


class HeldOut:
  """Finds text that repeats held-out queries.

  A text repeats a query where any 8 consecutive words of it, lower-cased, stand
  in the text; of a query of 3 to 8 words, all of them. One or two words are
  nobody's secret and do not count.
  """

  def __init__(self, queries: Iterable[str]):
    self._grams = {gram for query in queries for gram in grams(query)}
    self._lengths: dict[str, set[int]] = {}  # by the first word
    for gram in self._grams:
      self._lengths.setdefault(gram[0], set()).add(len(gram))

  def flags(self, texts: Sequence[Sequence[str]]) -> list[list[bool]]:
    """Tells which sentences of each text take part in a repetition.

    Args:
      texts: each a sequence of sentences; what is repeated may go over the
        ends of sentences, not over those of texts.

    Returns:
      For each text one flag for each sentence.
    """
    return [self._flagged(text) for text in texts]

  def _flagged(self, text: Sequence[str]) -> list[bool]:
    words, owners = [], []
    for number, sentence in enumerate(text):
      own = docstrings.words(sentence)
      words += own
      owners += [number] * len(own)
    flags = [False] * len(text)
    for start, word in enumerate(words):
      for length in self._lengths.get(word, ()):
        if tuple(words[start : start + length]) in self._grams:
          for owner in owners[start : start + length]:
            flags[owner] = True
    return flags


def grams(query: str) -> list[tuple[str, ...]]:
  """Returns the 8-grams of a query, or the whole of a shorter one.

  >>> grams("one two three")
  [('one', 'two', 'three')]
  >>> len(grams("a b c d e f g h i"))
  2
  """
  words = tuple(docstrings.words(query))
  if len(words) < 3:
    return []
  if len(words) <= _NGRAM:
    return [words]
  return [words[i : i + _NGRAM] for i in range(len(words) - _NGRAM + 1)]


def records(
  entries: Iterable[open_text.Entry],
  held_out: HeldOut,
  seen: set[str],
  dropped: collections.Counter,
  *,
  max_words: int = 90,
) -> Iterator[pretrain_tasks.Record]:
  """Makes records of entries: passages, and what was asked or said of them.

  Args:
    entries: of one source.
    held_out: what must not come through.
    seen: sentences of earlier sources, which are left out; grows.
    dropped: counts titles, sentences and records that repeat what is held out.
    max_words: length at which a passage is closed.

  Yields:
    The records, in the order of the entries; none of them repeats anything
    that is held out.
  """
  entries = list(entries)
  split = [[e.title, *split_sentences(e.text)] for e in entries]
  made = []
  flags = held_out.flags(split)
  for entry, sentences, flagged in zip(entries, split, flags, strict=True):
    dropped["titles"] += flagged[0]
    dropped["sentences"] += sum(flagged[1:])
    kept = []
    for sentence, is_flagged in zip(sentences[1:], flagged[1:], strict=True):
      if is_flagged or not _is_english(sentence):
        continue
      if entry.kind != "question" and len(sentence) > _SHORT:
        if sentence in seen:
          continue
        seen.add(sentence)
      kept.append(sentence.strip())
    title = entry.title if _is_title(entry) and not flagged[0] else ""
    made.extend(_records_of(entry.kind, title, passages(kept, max_words)))
  flags = held_out.flags([[m.query, "", m.passage] for m in made])
  for record, flagged in zip(made, flags, strict=True):
    dropped["records"] += any(flagged)  # across two sentences, or by a rule
    if not any(flagged):
      yield record


def _records_of(kind, title, found) -> Iterator[pretrain_tasks.Record]:
  for number, passage in enumerate(found):
    text = " ".join(passage)
    if title and number == 0:
      yield pretrain_tasks.Record(kind, title, text)
    elif sum(len(s.split()) for s in passage) >= _PASSAGE_WORDS:
      yield pretrain_tasks.Record("", "", text)
    if kind == "heading":
      for query in _asked(title if number == 0 else "", passage):
        yield pretrain_tasks.Record("rule", query, text)


def _asked(title: str, passage: Sequence[str]) -> list[str]:
  """Returns two questions by rule: of the title, and drawn from all sentences.

  The draw depends on the questions alone, so that forms are mixed.
  """
  first = rule_questions.ask(title, passage[0])
  others = {q for s in passage[1:] for q in rule_questions.ask("", s)}
  drawn = sorted({*first[1:], *others}, key=lambda q: zlib.crc32(q.encode()))
  return (first[:1] + drawn)[:2]


def _is_title(entry: open_text.Entry) -> bool:
  fewest, most = _WORDS[entry.kind]
  fits = fewest <= len(entry.title.split()) <= most and len(entry.title) > 3
  if entry.kind == "summary" and _SIGNATURE.search(entry.title):
    return False
  return fits and _is_english(entry.title)


def _is_english(text: str) -> bool:
  letters = sum(c.isalpha() or c == " " for c in text)
  return (
    len(text) >= 3 and letters >= 0.8 * len(text) and bool(_LATIN.match(text))
  )


def repeated(
  queries: Iterable[str], made: Iterable[pretrain_tasks.Record]
) -> int:
  """Counts the records that repeat a query: the promise is that none does."""
  held_out = HeldOut(queries)
  flags = held_out.flags([[r.query, "", r.passage] for r in made])
  return sum(map(any, flags))


def split_sentences(text: str) -> list[str]:
  """Cuts a text behind full stops and colons that a capital follows.

  >>> split_sentences("One is here. Two is not.")
  ['One is here.', 'Two is not.']
  """
  return _SENTENCE.split(text)


def passages(sentences: Iterable[str], max_words: int) -> list[tuple[str, ...]]:
  """Joins consecutive sentences into passages of about `max_words` words.

  >>> passages(["one two", "three", "four five six"], 3)
  [('one two', 'three'), ('four five six',)]
  """
  done, current, length = [], [], 0
  for sentence in sentences:
    words = sentence.split()[:max_words]
    if current and length + len(words) > max_words:
      done.append(tuple(current))
      current, length = [], 0
    current.append(" ".join(words))
    length += len(words)
  if current:
    done.append(tuple(current))
  return [
    p for p in done if sum(len(s.split()) for s in p) >= min(8, max_words)
  ]
