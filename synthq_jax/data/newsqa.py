"""Reads NewsQA: questions on CNN stories, with answers as spans of the text.

The set may not be redistributed. Its users pack it from the questions and the
CNN stories with Maluuba's scripts, whose output `combined-newsqa-data-v1.json`
this reader takes: "data" is a list of stories with "storyId", "text", "type"
(train, dev or test) and "questions". The reader uses "q" and "consensus" of a
question: "s" and "e" (its first character and the one after its last), or
"noAnswer" or "badQuestion".

The packed file holds the texts, with corrections on which the spans rely, so that
the reader needs no folder of stories. A story's name is the SHA-1 of its URL, a
line in the lists of Hermann et al. (`read_urls`), and the URL names its genre.

The real files are not available to the tests. The reader follows the description
and the code of Maluuba's scripts. Tested on small files in the same layout:
questions without a consensus, spans that end behind the text. Not tested: the real
files and the URLs of all stories.

References:
  Trischler et al., "NewsQA: A Machine Comprehension Dataset", 2017,
  arXiv:1611.09830; github.com/Maluuba/newsqa.
  Hermann et al., "Teaching Machines to Read and Comprehend", 2015,
  arXiv:1506.03340.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from synthq_jax.data import collection, files

__all__ = [
  "Question",
  "Story",
  "as_collection",
  "genre",
  "read",
  "read_urls",
]

Path = str | os.PathLike
Span = tuple[int, int]

_SPLITS = ("train", "dev", "test")
_OTHER = (LookupError, TypeError, AttributeError, RecursionError)
"""Errors that reading a file of another layout raises."""
_HOST = re.compile(r".*https?://[^/]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A question and its consensus answer.

  Attributes:
    id: "STORY-NUMBER", numbered within the story in the order of the file.
    text: the question.
    start: position of the answer's first character in the story.
    end: position after the answer's last character.
  """

  id: str
  text: str = dataclasses.field(repr=False)
  start: int
  end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
  """A story and the questions on it that have an answer.

  Attributes:
    id: the SHA-1 of its URL.
    text: the text, in whose characters spans count.
    split: "train", "dev" or "test".
    questions: its questions, possibly none.
  """

  id: str
  text: str = dataclasses.field(repr=False)
  split: str
  questions: tuple[Question, ...] = dataclasses.field(repr=False)


def read(path: Path) -> tuple[Story, ...]:
  """Reads the packed file, plain or compressed.

  Questions without a consensus, and spans without a character, are left out.

  Args:
    path: the file.

  Returns:
    The stories in the order of the file.

  Raises:
    ValueError: if the file has another layout, or a story has no split.
  """
  return tuple(_read_stories(path))


def as_collection(stories: Iterable[Story]) -> collection.Collection:
  """Converts stories to a collection: each is relevant to its own questions.

  Args:
    stories: stories from `read`.

  Returns:
    The collection, with the splits that have questions; every grade is 1.
  """
  stories = tuple(stories)
  asked = [
    (story, question) for story in stories for question in story.questions
  ]
  qrels: dict[str, collection.Qrels] = {}
  for story, question in asked:
    qrels.setdefault(story.split, {})[question.id] = {story.id: 1}
  return collection.Collection(
    tuple(collection.Document(story.id, story.text) for story in stories),
    tuple(collection.Query(each.id, each.text) for _, each in asked),
    qrels,
    split_by_record=True,
  )


def read_urls(paths: Iterable[Path]) -> dict[str, str]:
  """Reads lists of URLs, one a line.

  Args:
    paths: files such as wayback_training_urls.txt.

  Returns:
    Story id -> URL; the id is the SHA-1 of the line.

  Raises:
    ValueError: if a file is missing.
  """
  return {
    hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest(): url
    for path in paths
    for _, url in files.lines(path)
  }


def genre(url: str) -> str:
  """Returns the section of the paper that a CNN story's URL names.

  >>> genre("http://web.archive.org/web/2011id_/http://cnn.com/2009/WORLD/"
  ...       "europe/05/04/a.story/index.html")
  'world'

  Args:
    url: the story's URL, also within a URL of the Internet Archive.

  Returns:
    The section in lower case, or "" if the path names none. Its last part (the
    story) and its numbers (the date) are no sections.
  """
  path = _HOST.sub("", url, count=1)
  parts = urllib.parse.unquote(path).lower().strip("/").split("/")[:-1]
  first = next((part for part in parts if not part.isdigit()), "")
  return "" if "." in first else first


def _read_stories(path: Path) -> Iterator[Story]:
  try:
    stories = _parse_json(_read_text(path))["data"]
    for number, story in enumerate(stories, 1):
      where = f"{path}: story {number}"
      spans = (
        (question["q"], _get_span(question["consensus"]))
        for question in story["questions"]
      )
      yield _make_story(
        where, story["storyId"], story["text"], story["type"], spans
      )
  except _OTHER as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise ValueError(
      f"{path}: expected the layout of combined-newsqa-data-v1.json, got something"
      f" else ({got}); pack it again"
    ) from error


def _parse_json(text: str) -> Any:
  try:
    return json.loads(text)
  except ValueError as error:  # also raised for an integer that is too long
    raise TypeError("no JSON") from error


def _get_span(consensus: Mapping[str, Any]) -> Span | None:
  return (consensus["s"], consensus["e"]) if "s" in consensus else None


def _make_story(
  where: str,
  name: str,
  text: str,
  split: str,
  asked: Iterable[tuple[str, Span | None]],
) -> Story:
  """Makes a story with the questions whose spans hold a character of the
  text."""
  if split not in _SPLITS:
    raise ValueError(
      f"{where}: expected a split of {_SPLITS}, got {split!r}; correct its type"
    )
  id_ = _get_story_id(name)
  questions = tuple(
    Question(id=f"{id_}-{number}", text=question, start=span[0], end=end)
    for number, (question, span) in enumerate(asked)
    if question.strip() and span and span[0] < (end := min(span[1], len(text)))
  )
  return Story(id=id_, text=text, split=split, questions=questions)


def _get_story_id(name: str) -> str:
  """Returns the SHA-1 in "./cnn/stories/SHA-1.story".

  >>> _get_story_id("./cnn/stories/42d01e.story")
  '42d01e'
  """
  return pathlib.PurePosixPath(name).name.removesuffix(".story")


def _read_text(path: Path) -> str:
  try:
    with files.open_file(path) as stream:
      return stream.read().decode("utf-8")
  except (UnicodeDecodeError, *files.BROKEN_GZIP) as error:
    raise ValueError(
      f"{path}: expected UTF-8, plain or in sound gzip, got"
      f" {type(error).__name__}; copy the file again"
    ) from error
