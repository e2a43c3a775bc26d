"""Reads TREC topics in the formats of NIST, CLEF and FIRE since 1992.

NIST's first topics are not XML: few tags are closed, a title may hold "<" and "&",
and other fields may come between number and title. The web tracks have XML with
the number in an attribute.

References:
  Harman, "Overview of the First Text REtrieval Conference (TREC-1)", 1992.
"""

import bisect
import html
import itertools
import os
import re
from collections.abc import Container, Iterator

from synthq_jax.data import collection, files

__all__ = ["Topics", "is_topics", "match_judged_ids", "read", "remove_zeros"]

_TOP = re.compile(r"<top(?:ic)?(?:\s[^<>]*)?>", re.IGNORECASE)
_BOTTOM = re.compile(r"</top(?:ic)?\s*>", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_IN_ATTRIBUTE = re.compile(r"\bnumber\s*=\s*[\"']([^\"'<>]*)[\"']")
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z]\w*);")

_NUMBER = "num|number|identifier"
_TEXTS = (
  ("title", "Topic"),
  ("query", ""),
  ("desc|description", "Description"),
)
"""Fields that may be the query, best first, and the label before their text."""
_OTHERS = "head|dom|smry|narr|narrative|con|fac|def|nat|time|querytime|question"

_END = re.compile(
  r"^\s*</?[a-z][\w-]*(?:\s[^<>]*)?>"
  rf"|</?(?:\w\w-)?(?:{_NUMBER}|{'|'.join(x for x, _ in _TEXTS)}|{_OTHERS})"
  r"(?:\s[^<>]*)?>",
  re.IGNORECASE | re.MULTILINE,
)
"""Pattern of the end of an unclosed field: a tag at the start of a line or of a
known field. Any other "<" is text."""


class Topics(list):
  """A list of topics, each as (position, query).

  Attributes:
    have_titles: True if each query is a title; False if some are descriptions.
  """

  have_titles = True


def is_topics(path: str | os.PathLike) -> bool:
  """Returns True if a file holds TREC topics, that is, if it begins with a tag.

  Anserini uses .txt for topics and for tables of number, tab and query.

  Args:
    path: the file.

  Raises:
    ValueError: as `files.lines`.
  """
  first = (line.lstrip()[:1] for _, line in files.lines(path))
  return next(first, "") == "<"


def read(path: str | os.PathLike) -> Topics:
  """Reads the number and the query of every topic.

  The query is the title, or the description of a topic without title (TREC-4's,
  201 to 250). Leading zeros of a number in digits are removed: NIST writes 051 in
  its topics and 51 in its judgements.

  Args:
    path: the file, plain or compressed.

  Returns:
    The topics, in the order of the file.

  Raises:
    ValueError: if a topic has no number, two numbers, two titles or no text; the
      message says file:line.
  """
  lines = [*files.lines(path)]
  text = "\n".join(line for _, line in lines)
  text = _COMMENT.sub(lambda match: re.sub(".", " ", match[0]), text)
  ends = [*itertools.accumulate(len(line) + 1 for _, line in lines)]
  tops = [*_TOP.finditer(text)]
  topics, start = Topics(), 0
  for top, after in itertools.zip_longest(tops, tops[1:]):
    where = lines[bisect.bisect(ends, top.start())][0]
    _refuse_strays(where, text[start : top.start()])
    start = after.start() if after else len(text)
    body, _, rest = _split_at_bottom(text[top.end() : start])
    _refuse_strays(where, rest)
    query, is_title = _make_query(where, top[0], body)
    topics.append((where, query))
    topics.have_titles &= is_title
  if not tops:
    raise ValueError(
      f"{path}: expected topics that begin with <top>, got none; fill the file"
    )
  return topics


def remove_zeros(number: str) -> str:
  """Removes leading zeros from a topic's number, if it is in digits.

  >>> [remove_zeros(number) for number in ("051", "0", "MB001")]
  ['51', '0', 'MB001']
  """
  is_number = number.isascii() and number.isdigit()
  return str(int(number)) if is_number else number


def match_judged_ids(topics: Topics, judged: Container[str]) -> Topics:
  """Gives topics the ids of their judgements: MB001 becomes 1 if these have 1.

  Args:
    topics: topics with the ids of their file.
    judged: ids in the judgements.

  Returns:
    Topics with the digits as ids. Topics stay as they are if one is judged by its
    id, or none by its digits.
  """
  if any(query.id in judged for _, query in topics):
    return topics
  renamed = Topics()
  renamed.have_titles = topics.have_titles
  for where, query in topics:
    digits = re.sub(r"^[A-Za-z]+(?=\d+$)", "", query.id)
    renamed.append((where, collection.Query(remove_zeros(digits), query.text)))
  are_judged = any(query.id in judged for _, query in renamed)
  return renamed if are_judged else topics


def _split_at_bottom(text: str) -> tuple[str, str, str]:
  """Splits a topic's text at its closing tag."""
  bottom = _BOTTOM.search(text)
  if not bottom:
    return text, "", ""
  return text[: bottom.start()], bottom[0], text[bottom.end() :]


def _refuse_strays(where: str, text: str) -> None:
  """Refuses a number outside of topics: its topic would be lost."""
  if next(_find_fields(_NUMBER, text), None):
    raise ValueError(
      f"{where}: expected <top> before each <num>, got one outside of a topic"
      " near this line; add the tag"
    )


def _make_query(
  where: str, tag: str, body: str
) -> tuple[collection.Query, bool]:
  """Makes the query of one topic; also returns True if it is the title."""
  number = _get_field(where, _NUMBER, "Number", body)
  if not number and (attribute := _IN_ATTRIBUTE.search(tag)):
    number = attribute[1].strip()
  if not number:
    raise ValueError(
      f"{where}: expected a number in each topic, got none; add <num>"
    )
  for name, word in _TEXTS:
    if text := _get_field(where, name, word, body):
      number = remove_zeros(collection.check_id("query", number, where))
      return collection.Query(number, text), not name.startswith("desc")
  raise ValueError(
    f"{where}: expected a title, a query or a description in each topic, got"
    " none; add one, or remove the topic and its judgements"
  )


def _get_field(where: str, name: str, word: str, body: str) -> str:
  """Returns the text of a field, or ""; refuses a field that occurs twice."""
  texts = [*_find_fields(name, body)]
  if len(texts) > 1:
    raise ValueError(
      f"{where}: expected <{name.partition('|')[0]}> once in a topic, got it"
      f" {len(texts)} times; divide the topic, or remove one"
    )
  text = texts[0].strip() if texts else ""
  if word:
    text = re.sub(rf"^{word}\s*:", "", text)
  text = _ENTITY.sub(lambda match: html.unescape(match[0]), text)
  return " ".join(text.split())


def _find_fields(name: str, body: str) -> Iterator[str]:
  """Yields the text after each tag of a name, up to the end of its field."""
  tag = re.compile(rf"<((?:\w\w-)?(?:{name}))(?:\s[^<>]*)?>", re.IGNORECASE)
  for opened in tag.finditer(body):
    rest = body[opened.end() :]
    closing = re.search(rf"</{opened[1]}\s*>", rest, re.IGNORECASE)
    end = closing or _END.search(rest)
    yield rest[: end.start()] if end else rest
