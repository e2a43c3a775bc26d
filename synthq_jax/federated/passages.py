"""Splits passages into sentences, and finds the sentences that answer questions.

Judgements come in three kinds, each with a function:

- `from_sentences`: documents are sentences, and judgements mark answers
  (WikiQA). These labels are true.
- `from_stories`: judgements are spans of a text (NewsQA). The sentences that
  overlap a span are answers.
- `from_documents`: whole documents are judged (MedQuAD, the demo set), without
  labels of sentences. In rankings, all sentences of a judged passage count as
  answers, so values on sentences measure how well passages are found by their
  sentences. Training uses one sentence, the first that is long enough. Both are
  choices of this project. Neither compares a sentence with the question: an
  answer chosen by common words would make BM25 right by construction. Sentences
  that end with a question mark are left out. Many passages begin with the
  question itself, which matches its own words and answers nothing. A passage of
  questions alone keeps them.

Equal sentences of one passage count once. Equal sentences of several passages
stay, each with its own passage.

A sentence ends at a blank line, or at a mark that no lower-case word follows. It
does not end after an abbreviation, an initial or the number of a list item, nor
within a decimal. Items of a list (" - ") begin sentences only after such a mark:
an item such as "fever" alone says nothing. A sentence with too many words is cut,
if possible before an item, else after a semicolon or a comma. The rules are for
English. They know no headings: a heading without a mark at its end stays in front
of the next sentence.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import newsqa

__all__ = [
  "MAX_WORDS",
  "MIN_WORDS",
  "JudgedPassages",
  "Passage",
  "Question",
  "from_documents",
  "from_sentences",
  "from_stories",
  "sentence_spans",
  "split_sentences",
]

MAX_WORDS = 60
"""Words of the longest sentence: about 100 tokens of a small vocabulary."""

MIN_WORDS = 6
"""Least number of words of a sentence to train on."""


_END = re.compile(r"""[.!?\u2026]+["'\u201d\u2019)\]]*(?=\s)|\n\s*\n""")
_NEXT = re.compile(r"""\s*([-*\u2022]\s+)?["'\u201c\u2018(\[]*(\w+|\S)?""")
_BULLET = re.compile(r"(?:[-*\u2022]\s+)+")
_BULLETS = {"-", "*", "\u2022"}
_WORD = re.compile(r"\S+")
_LAST_WORD = re.compile(r"[\w.]*$")
_ITEM_NUMBER = re.compile(r"\(?(?:\d{1,3}|[A-Za-z])")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]|[A-Z]")


_ABBREVIATIONS = frozenset(
  "al approx cf dept dr e.g eds eqs esp figs fig ft i.e inc jr ltd mr mrs ms "
  "pp prof sr st vol vs".split()
)


_BEFORE_NUMBERS = frozenset(
  "ed eq no nos p sec jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
"""Abbreviations only in front of a number: "No. 5", but "She said no."."""


_TITLES = frozenset("capt col gen gov lt mt rep rev sen sgt".split())
"""Abbreviations only with a capital: "Rep. Doe", but "a rep."."""


_STARTERS = frozenset(
  "a although an and are as at because but by each for from he her his how "
  "however if in is it its many most no not on or our she since some such that "
  "the their then there these they this those to we what when where which who "
  "with you your".split()
)
"""Words that begin a sentence: initials before them end the previous one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
  """A passage as its sentences.

  Attributes:
    id: id of its document.
    sentences: distinct sentences, at least one, in order.
    client: name of the client that holds it; "" for no client.
  """

  id: str
  sentences: tuple[str, ...] = dataclasses.field(repr=False)
  client: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
  """A question and the sentences that answer it, private as queries are.

  Attributes:
    id: id of the query.
    text: text of the question.
    split: "train", "dev", "test" or another.
    answers: passage id -> distinct positions of its sentences that answer.
      Training uses the first position of the first passage.
    client: name of the client that asked; "" for the client that holds the first
      passage that answers.
  """

  id: str
  text: str = dataclasses.field(repr=False)
  split: str
  answers: Mapping[str, tuple[int, ...]]
  client: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedPassages:
  """Passages, and questions that they answer.

  Attributes:
    passages: passages with distinct ids.
    questions: questions with distinct (split, id).

  Raises:
    ValueError: if an id occurs twice, or a question has no answer, or one that is
      no sentence of a passage.
  """

  passages: tuple[Passage, ...] = dataclasses.field(repr=False)
  questions: tuple[Question, ...] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Checks ids and answers."""
    held = {passage.id for passage in self.passages}
    asked = {(question.split, question.id) for question in self.questions}
    if len(held) < len(self.passages) or len(asked) < len(self.questions):
      raise ValueError(
        "expected distinct ids, got some twice among "
        f"{len(self.passages)} passages and {len(self.questions)} questions; "
        "rename or remove those"
      )
    sizes = {passage.id: len(passage.sentences) for passage in self.passages}
    for question in self.questions:
      if not question.answers or not all(question.answers.values()):
        raise ValueError(
          f"expected an answer to each question, got none to {question.id!r};"
          " leave it out"
        )
      for passage, positions in question.answers.items():
        # A position behind a passage's end is a sentence of the next passage.
        if not all(0 <= at < sizes.get(passage, 0) for at in positions):
          raise ValueError(
            "expected answers as positions in the sentences of a passage, from 0,"
            f" got others in an answer to {question.id!r}; correct them"
          )

  def splits(self) -> tuple[str, ...]:
    """Returns the names of the splits, sorted."""
    return tuple(sorted({question.split for question in self.questions}))


def from_documents(
  collection: collection_lib.Collection,
  *,
  max_sentences: int | None = None,
) -> JudgedPassages:
  """Splits documents into sentences; all sentences of judged documents answer.

  This module's top explains the choices. A title gives the first sentences of its
  document. Training uses the first sentence of a judged passage with `MIN_WORDS`
  words, or else the longest sentence.

  Args:
    collection: collection whose documents become passages, with its clients.
    max_sentences: maximum number of sentences of a passage; further ones are
      left out. None keeps all.

  Returns:
    The passages in order of the documents, without passages that have no letter
    or digit. The questions come in order of their split's judgements, without
    questions that no passage answers.

  >>> data = collection_lib.Collection(
  ...     documents=(
  ...         collection_lib.Document("d", "What? In short. It is a red, sweet fruit."),
  ...     ),
  ...     queries=(collection_lib.Query("q", "what is it"),),
  ...     qrels={"train": {"q": {"d": 1}}},
  ... )
  >>> judged = from_documents(data)
  >>> judged.passages[0].sentences, judged.questions[0].answers
  (('In short.', 'It is a red, sweet fruit.'), {'d': (1, 0)})
  """
  if max_sentences is not None and max_sentences < 1:
    raise ValueError(
      f"expected max_sentences >= 1 or None, got {max_sentences}; raise it"
    )
  passages: dict[str, Passage] = {}
  for document in collection.documents:
    sentences = [
      sentence
      for part in (document.title, document.text)
      for sentence in split_sentences(part)
    ]
    told = [text for text in sentences if not text.rstrip("\"')").endswith("?")]
    if selected := told or sentences:
      distinct = tuple(dict.fromkeys(selected))[:max_sentences]
      passages[document.id] = Passage(
        id=document.id, sentences=distinct, client=document.client
      )
  answers = {
    name: (name, _put_trained_first(passage.sentences))
    for name, passage in passages.items()
  }
  return _make_judged(collection, passages, answers)


def _put_trained_first(texts: Sequence[str]) -> tuple[int, ...]:
  """Returns all positions, beginning with the sentence to train on."""
  lengths = [len(text.split()) for text in texts]
  longest = max(range(len(texts)), key=lengths.__getitem__)
  first = next((i for i, n in enumerate(lengths) if n >= MIN_WORDS), longest)
  return first, *(i for i in range(len(texts)) if i != first)


def from_sentences(
  collection: collection_lib.Collection, passage_of: Mapping[str, str]
) -> JudgedPassages:
  """Joins documents that are sentences into passages; judgements are answers.

  A passage has the client of all its sentences, or none if they differ.

  Args:
    collection: collection whose documents are sentences, in the order of their
      passages.
    passage_of: document id -> passage id, for all documents, for example
      `beir.read_key(directory, "doc")`.

  Returns:
    The passages in order of their first sentences. Training uses the answer that
    is judged first.

  Raises:
    ValueError: if a document has no passage.
  """
  grouped: dict[str, list[collection_lib.Document]] = {}
  for document in collection.documents:
    if document.id not in passage_of:
      raise ValueError(
        f"expected a passage for each document, got none for {document.id!r};"
        " add it"
      )
    grouped.setdefault(passage_of[document.id], []).append(document)
  passages: dict[str, Passage] = {}
  answers: dict[str, tuple[str, tuple[int, ...]]] = {}
  for name, documents in grouped.items():
    texts = tuple(dict.fromkeys(each.contents for each in documents))
    position = {text: index for index, text in enumerate(texts)}
    clients = {each.client for each in documents}
    passages[name] = Passage(
      id=name,
      sentences=texts,
      client=clients.pop() if len(clients) == 1 else "",
    )
    for each in documents:
      answers[each.id] = (name, (position[each.contents],))
  return _make_judged(collection, passages, answers)


def from_stories(stories: Iterable[newsqa.Story]) -> JudgedPassages:
  """Splits news stories into sentences; those that overlap an answer's span answer.

  If a span overlaps several sentences, training uses the one with most of it.

  Args:
    stories: stories from `newsqa.read`.

  Returns:
    The passages, one for each story that has a sentence, and the questions
    whose span overlaps a sentence. Clients are not set.
  """
  passages, questions = [], []
  for story in stories:
    spans = sentence_spans(story.text)
    texts = [story.text[start:end] for start, end in spans]
    position = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if not position:
      continue
    passages.append(Passage(id=story.id, sentences=tuple(position)))
    for question in story.questions:
      shares = {
        position[text]: -overlap
        for text, (start, end) in zip(texts, spans, strict=True)
        if (overlap := min(end, question.end) - max(start, question.start)) > 0
      }
      if shares:
        answers = {
          story.id: tuple(sorted(shares, key=lambda i: (shares[i], i)))
        }
        questions.append(
          Question(
            id=question.id,
            text=question.text,
            split=story.split,
            answers=answers,
          )
        )
  return JudgedPassages(passages=tuple(passages), questions=tuple(questions))


def _make_judged(
  collection: collection_lib.Collection,
  passages: Mapping[str, Passage],
  answers: Mapping[str, tuple[str, tuple[int, ...]]],
) -> JudgedPassages:
  """Makes judged passages of the queries that have at least one answer.

  `answers` maps a document to its passage and to the positions that answer if
  the document is judged relevant.
  """
  queries = collection.query_by_id()
  questions = []
  for split, qrels in collection.qrels.items():
    for query, grades in qrels.items():
      by_passage: dict[str, tuple[int, ...]] = {}
      for document, grade in grades.items():
        if grade > 0 and document in answers:
          name, positions = answers[document]
          joined = (*by_passage.get(name, ()), *positions)
          by_passage[name] = tuple(dict.fromkeys(joined))
      if by_passage:
        questions.append(
          Question(
            id=query,
            text=queries[query].text,
            split=split,
            answers=by_passage,
            client=queries[query].client,
          )
        )
  return JudgedPassages(
    passages=tuple(passages.values()), questions=tuple(questions)
  )


def sentence_spans(text: str) -> list[tuple[int, int]]:
  """Returns the beginning and the end of each sentence.

  >>> text = "Dr. J. Doe took 2.5 mg. - Fever. - A rash."
  >>> [text[start:end] for start, end in sentence_spans(text)]
  ['Dr. J. Doe took 2.5 mg.', 'Fever.', 'A rash.']

  Args:
    text: a passage.

  Returns:
    Beginnings and ends (exclusive) in order, without white space, the dash of an
    item, and pieces without a letter or digit.
  """
  spans, start = [], 0
  for match in _END.finditer(text):
    if _is_end(text, start, match):
      spans += _cut(text, start, match.end())
      start = match.end()
  return spans + _cut(text, start, len(text))


def split_sentences(text: str) -> list[str]:
  """Returns the sentences of a text.

  >>> split_sentences("It is sold in the U.S. The U.S. Army buys it, e.g. in Ft. Knox.")
  ['It is sold in the U.S.', 'The U.S. Army buys it, e.g. in Ft. Knox.']

  Args:
    text: a passage.

  Returns:
    Sentences in order, with unchanged white space inside.
  """
  return [text[start:end] for start, end in sentence_spans(text)]


def _is_end(text: str, start: int, match: re.Match) -> bool:
  """Checks that a sentence ends at a match of `_END`."""
  mark = match.group()
  if not mark.strip():
    return True  # a blank line
  bullet, following = _NEXT.match(text, match.end()).groups()
  if following is None or bullet:
    return True
  if following[0].islower():
    return False
  return mark[0] != "." or not _is_abbreviation(
    text[start : match.start()], following
  )


def _is_abbreviation(sentence: str, following: str) -> bool:
  """Checks that a full stop belongs to the last word of the text before it."""
  if _ITEM_NUMBER.fullmatch(sentence.strip()):
    return True
  word = _LAST_WORD.search(sentence).group()
  if _INITIALS.fullmatch(word) and word.lower() not in _ABBREVIATIONS:
    return following.lower() not in _STARTERS
  return (
    word.lower() in _ABBREVIATIONS
    or (word.lower() in _BEFORE_NUMBERS and following[0].isdigit())
    or (word.lower() in _TITLES and word[0].isupper())
  )


def _cut(text: str, start: int, end: int) -> list[tuple[int, int]]:
  """Returns the bounds of a sentence, or of the pieces of a long one, trimmed."""
  words = [
    (match.start(), match.end()) for match in _WORD.finditer(text, start, end)
  ]
  pieces = []
  while words:
    size = _find_size(text, words)
    pieces.append(_trim(text, words[0][0], words[size - 1][1]))
    words = words[size:]
  return [piece for piece in pieces if piece]


def _find_size(text: str, words: list[tuple[int, int]]) -> int:
  """Returns the number of words of the first piece."""
  if len(words) <= MAX_WORDS:
    return len(words)
  positions = range(MAX_WORDS, MAX_WORDS // 2, -1)
  tests = (
    lambda position: text[slice(*words[position])] in _BULLETS,
    lambda position: text[words[position - 1][1] - 1] in ";:",
    lambda position: text[words[position - 1][1] - 1] == ",",
  )
  for test in tests:
    for position in positions:
      if test(position):
        return position
  return MAX_WORDS


def _trim(text: str, start: int, end: int) -> tuple[int, int] | None:
  """Removes the dash of an item; None if no letter or digit remains."""
  bullet = _BULLET.match(text, start, end)
  start = bullet.end() if bullet else start
  if not any(character.isalnum() for character in text[start:end]):
    return None
  return start, end
