"""Splits passages into sentences, and says which answer which question.

Judgements come in three kinds, each with a function:

- `from_sentences`: documents are sentences, and judgements say which answer
  (WikiQA): true labels.
- `from_stories`: judgements are spans of a text (NewsQA): the sentences that a
  span lies in answer.
- `from_documents`: whole documents are judged (MedQuAD, the demo set), and
  nobody said which sentence answers. Then all sentences of a judged passage
  count as answers in rankings, so that values on sentences say how well
  passages are found by their sentences; and a model is trained on one, the
  first that is long enough. Both are choices of this project. Neither compares
  a sentence with the question: an answer chosen by common words would make
  BM25 right by construction. Sentences that end with a question mark are
  left out, since many passages begin with the question itself, which
  would be found by its words and answers nothing; a passage of nothing else
  keeps them.

Sentences that stand twice in a passage count once. Those of several passages
stay, each with its own passage.

A sentence ends at a blank line, or at a mark that no lower-case word follows:
not behind an abbreviation, an initial, the number of a list's item or inside of
a decimal. Items of a list (" - ") begin sentences only behind such a mark: an
item such as "fever" alone says nothing. A sentence with too many words is cut,
where possible before an item, else behind a semicolon or a comma. The rules are
for English. They know no headings: one without a mark at its end stays in front
of the sentence that follows.
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
"""The words of the longest sentence: about 100 tokens of a small vocabulary."""

MIN_WORDS = 6
"""The words that a sentence to train on has at least."""


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
"""Abbreviations in front of a number alone: "No. 5", but "She said no."."""


_TITLES = frozenset("capt col gen gov lt mt rep rev sen sgt".split())
"""Abbreviations where they begin with a capital: "Rep. Doe", but "a rep."."""


_STARTERS = frozenset(
  "a although an and are as at because but by each for from he her his how "
  "however if in is it its many most no not on or our she since some such that "
  "the their then there these they this those to we what when where which who "
  "with you your".split()
)
"""Words that begin a sentence: behind them, initials end the one before."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
  """A passage as its sentences.

  Attributes:
    id: that of its document.
    sentences: distinct ones, at least one, in order.
    client: who holds it; "" for nobody in particular.
  """

  id: str
  sentences: tuple[str, ...] = dataclasses.field(repr=False)
  client: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
  """A question and the sentences that answer it, private as queries are.

  Attributes:
    id: of the query.
    text: what was asked.
    split: "train", "dev", "test" or another.
    answers: passage id -> positions of sentences in it, none twice; the first
      of the first passage is the one to train on.
    client: who asked; "" for whoever holds the first passage that answers.
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
    passages: with distinct ids.
    questions: (split, id) is distinct.

  Raises:
    ValueError: if an id stands twice, or a question has no answer.
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
    for question in self.questions:
      if not question.answers:
        raise ValueError(
          f"expected an answer to each question, got none to {question.id!r};"
          " leave it out"
        )

  def splits(self) -> tuple[str, ...]:
    """Returns the names of the splits, sorted."""
    return tuple(sorted({question.split for question in self.questions}))


def from_documents(
  collection: collection_lib.Collection,
  *,
  max_sentences: int | None = None,
) -> JudgedPassages:
  """Splits documents into sentences; all those of a judged one are answers.

  The head of this module says what is chosen here, and why. A title is the
  first sentence of its document. A model is trained on the first sentence of a
  judged passage that has `MIN_WORDS`, or on the longest where none has.

  Args:
    collection: its documents become passages; its clients are taken over.
    max_sentences: what stands behind so many in a passage is left out; None
      keeps all.

  Returns:
    The passages in order of the documents, without those that have no letter
    or digit, and the questions in order of their split's judgements, without
    those that no passage answers.

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
    found = [
      sentence
      for part in (document.title, document.text)
      for sentence in split_sentences(part)
    ]
    told = [text for text in found if not text.rstrip("\"')").endswith("?")]
    if kept := told or found:
      distinct = tuple(dict.fromkeys(kept))[:max_sentences]
      passages[document.id] = Passage(
        id=document.id, sentences=distinct, client=document.client
      )
  answers = {
    name: (name, _trained_first(passage.sentences))
    for name, passage in passages.items()
  }
  return _judged(collection, passages, answers)


def _trained_first(texts: Sequence[str]) -> tuple[int, ...]:
  """Returns all positions, the sentence to train on in front."""
  lengths = [len(text.split()) for text in texts]
  longest = max(range(len(texts)), key=lengths.__getitem__)
  first = next((i for i, n in enumerate(lengths) if n >= MIN_WORDS), longest)
  return first, *(i for i in range(len(texts)) if i != first)


def from_sentences(
  collection: collection_lib.Collection, passage_of: Mapping[str, str]
) -> JudgedPassages:
  """Joins documents that are sentences to passages; judgements are answers.

  A passage has the client that all its sentences agree on, or none.

  Args:
    collection: its documents are sentences, in the order of their passages.
    passage_of: document id -> passage id, for all documents, such as
      `beir.read_key(directory, "doc")`.

  Returns:
    The passages in order of their first sentences. Of answers, the one judged
    first is trained on.

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
  return _judged(collection, passages, answers)


def from_stories(stories: Iterable[newsqa.Story]) -> JudgedPassages:
  """Splits news stories into sentences; those with an answer's span answer.

  Of several sentences that a span lies in, the one with the most of it is
  trained on.

  Args:
    stories: from `newsqa.read`.

  Returns:
    The passages, one for each story that has a sentence, and the questions
    whose span lies in one. Clients are not set.
  """
  passages, questions = [], []
  for story in stories:
    places = sentence_spans(story.text)
    texts = [story.text[start:end] for start, end in places]
    position = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if not position:
      continue
    passages.append(Passage(id=story.id, sentences=tuple(position)))
    for question in story.questions:
      shares = {
        position[text]: -overlap
        for text, (start, end) in zip(texts, places, strict=True)
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


def _judged(
  collection: collection_lib.Collection,
  passages: Mapping[str, Passage],
  answers: Mapping[str, tuple[str, tuple[int, ...]]],
) -> JudgedPassages:
  """Puts passages and the judged queries that something answers together.

  `answers` gives each document's passage, and what its judgement means there.
  """
  queries = collection.query_by_id()
  questions = []
  for split, qrels in collection.qrels.items():
    for query, grades in qrels.items():
      found: dict[str, tuple[int, ...]] = {}
      for document, grade in grades.items():
        if grade > 0 and document in answers:
          name, positions = answers[document]
          joined = (*found.get(name, ()), *positions)
          found[name] = tuple(dict.fromkeys(joined))
      if found:
        questions.append(
          Question(
            id=query,
            text=queries[query].text,
            split=split,
            answers=found,
            client=queries[query].client,
          )
        )
  return JudgedPassages(
    passages=tuple(passages.values()), questions=tuple(questions)
  )


def sentence_spans(text: str) -> list[tuple[int, int]]:
  """Returns where each sentence begins and ends.

  >>> text = "Dr. J. Doe took 2.5 mg. - Fever. - A rash."
  >>> [text[start:end] for start, end in sentence_spans(text)]
  ['Dr. J. Doe took 2.5 mg.', 'Fever.', 'A rash.']

  Args:
    text: a passage.

  Returns:
    Beginnings and ends (exclusive) in order. They leave out white space, the
    dash of an item, and pieces without a letter or digit.
  """
  found, start = [], 0
  for match in _END.finditer(text):
    if _ends(text, start, match):
      found += _cut(text, start, match.end())
      start = match.end()
  return found + _cut(text, start, len(text))


def split_sentences(text: str) -> list[str]:
  """Returns the sentences of a text.

  >>> split_sentences("It is sold in the U.S. The U.S. Army buys it, e.g. in Ft. Knox.")
  ['It is sold in the U.S.', 'The U.S. Army buys it, e.g. in Ft. Knox.']

  Args:
    text: a passage.

  Returns:
    Sentences in order, white space inside them as it was.
  """
  return [text[start:end] for start, end in sentence_spans(text)]


def _ends(text: str, start: int, match: re.Match) -> bool:
  """Whether a sentence ends where one could."""
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
  """Whether a full stop belongs to the last word of what stands before it."""
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
  """Returns a sentence, or the pieces of a long one, without what is around."""
  words = [
    (match.start(), match.end()) for match in _WORD.finditer(text, start, end)
  ]
  pieces = []
  while words:
    size = _size(text, words)
    pieces.append(_bare(text, words[0][0], words[size - 1][1]))
    words = words[size:]
  return [piece for piece in pieces if piece]


def _size(text: str, words: list[tuple[int, int]]) -> int:
  """Returns how many words the first piece has."""
  if len(words) <= MAX_WORDS:
    return len(words)
  places = range(MAX_WORDS, MAX_WORDS // 2, -1)
  tests = (
    lambda place: text[slice(*words[place])] in _BULLETS,
    lambda place: text[words[place - 1][1] - 1] in ";:",
    lambda place: text[words[place - 1][1] - 1] == ",",
  )
  for test in tests:
    for place in places:
      if test(place):
        return place
  return MAX_WORDS


def _bare(text: str, start: int, end: int) -> tuple[int, int] | None:
  """Takes the dash of an item away; None where nothing is left to read."""
  bullet = _BULLET.match(text, start, end)
  start = bullet.end() if bullet else start
  if not any(character.isalnum() for character in text[start:end]):
    return None
  return start, end
