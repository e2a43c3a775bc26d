"""Passages as sentences, and which of them answer which question.

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
  would be found by its words and answers nothing.

Sentences that stand twice in a passage count once. Those of several passages
stay, each with its own passage.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from synthq_jax.data import collection as collection_lib
from synthq_jax.data import newsqa
from synthq_jax.federated import sentences as sentences_lib

__all__ = [
  "JudgedPassages",
  "Passage",
  "Question",
  "from_documents",
  "from_sentences",
  "from_stories",
]

MIN_WORDS = 6
"""The words that a sentence to train on has at least."""


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
    ValueError: if an id stands twice, a passage has no sentence, or an answer
      is none of its passage.
  """

  passages: tuple[Passage, ...] = dataclasses.field(repr=False)
  questions: tuple[Question, ...] = dataclasses.field(repr=False)

  def __post_init__(self):
    """Checks ids and answers."""
    sizes = {passage.id: len(passage.sentences) for passage in self.passages}
    asked = {(question.split, question.id) for question in self.questions}
    if len(sizes) < len(self.passages) or len(asked) < len(self.questions):
      raise ValueError(
        "expected distinct ids, got some twice among "
        f"{len(self.passages)} passages and {len(self.questions)} questions; "
        "rename or remove those"
      )
    if min(sizes.values(), default=0) < 1:
      raise ValueError(
        "expected passages of one sentence or more, got a passage or a "
        "collection without any; leave it out"
      )
    for question in self.questions:
      _check_answers(question, sizes)

  def splits(self) -> tuple[str, ...]:
    """Returns the names of the splits, sorted."""
    return tuple(sorted({question.split for question in self.questions}))


def from_documents(
  collection: collection_lib.Collection,
  *,
  max_words: int = sentences_lib.MAX_WORDS,
  min_words: int = MIN_WORDS,
  max_sentences: int | None = None,
  keep_questions: bool = False,
) -> JudgedPassages:
  """Splits documents into sentences; all those of a judged one are answers.

  The head of this module says what is chosen here, and why. A title is the
  first sentence of its document.

  Args:
    collection: its documents become passages; its clients are taken over.
    max_words: the words of the longest sentence; longer ones are cut.
    min_words: a model is trained on the first sentence of a judged passage
      that has so many, or on the longest where none has.
    max_sentences: what stands behind so many in a passage is left out; None
      keeps all.
    keep_questions: whether sentences that end with a question mark stay. A
      passage of nothing else keeps them anyway.

  Returns:
    The passages in order of the documents, without those that have no letter
    or digit, and the questions in order of their split's judgements, without
    those that no passage answers.

  >>> data = collection_lib.Collection(
  ...     documents=(
  ...         collection_lib.Document("d", "What? In short. It is a red fruit."),
  ...     ),
  ...     queries=(collection_lib.Query("q", "what is it"),),
  ...     qrels={"train": {"q": {"d": 1}}},
  ... )
  >>> judged = from_documents(data, min_words=4)
  >>> judged.passages[0].sentences, judged.questions[0].answers
  (('In short.', 'It is a red fruit.'), {'d': (1, 0)})
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
      for sentence in sentences_lib.split(part, max_words=max_words)
    ]
    told = [text for text in found if not text.rstrip("\"')").endswith("?")]
    kept = found if keep_questions or not told else told
    if kept:
      distinct = tuple(dict.fromkeys(kept))[:max_sentences]
      passages[document.id] = Passage(
        id=document.id, sentences=distinct, client=document.client
      )
  answers = {
    name: (name, _trained_first(passage.sentences, min_words))
    for name, passage in passages.items()
  }
  return _judged(collection, passages, answers)


def _trained_first(texts: Sequence[str], min_words: int) -> tuple[int, ...]:
  """Returns all positions, the sentence to train on in front."""
  lengths = [len(text.split()) for text in texts]
  longest = max(range(len(texts)), key=lengths.__getitem__)
  first = next((i for i, n in enumerate(lengths) if n >= min_words), longest)
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


def from_stories(
  stories: Iterable[newsqa.Story], *, max_words: int = sentences_lib.MAX_WORDS
) -> JudgedPassages:
  """Splits news stories into sentences; those with an answer's span answer.

  Of several sentences that a span lies in, the one with the most of it is
  trained on.

  Args:
    stories: from `newsqa.read`.
    max_words: the words of the longest sentence; longer ones are cut.

  Returns:
    The passages, one for each story that has a sentence, and the questions
    whose span lies in one. Clients are not set.
  """
  passages, questions = [], []
  for story in stories:
    places = sentences_lib.spans(story.text, max_words=max_words)
    texts = [story.text[start:end] for start, end in places]
    position = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if not position:
      continue
    passages.append(Passage(id=story.id, sentences=tuple(position)))
    for question in story.questions:
      shares = {
        position[text]: -overlap
        for text, place in zip(texts, places, strict=True)
        if (overlap := _overlap(place, (question.start, question.end))) > 0
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


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
  """Returns how many characters two spans share; below 1 for none."""
  return min(one[1], other[1]) - max(one[0], other[0])


def _judged(
  collection: collection_lib.Collection,
  passages: Mapping[str, Passage],
  answers: Mapping[str, tuple[str, tuple[int, ...]]],
) -> JudgedPassages:
  """Puts passages and the judged queries of all splits together.

  Args:
    collection: whose judgements.
    passages: by id.
    answers: document id -> its passage, and what its judgement means there.
  """
  return JudgedPassages(
    passages=tuple(passages.values()),
    questions=tuple(_questions(collection, answers)),
  )


def _questions(
  collection: collection_lib.Collection,
  answers: Mapping[str, tuple[str, tuple[int, ...]]],
) -> Iterator[Question]:
  """Yields the judged queries that something answers."""
  queries = collection.query_by_id()
  for split, qrels in collection.qrels.items():
    for query, grades in qrels.items():
      found: dict[str, tuple[int, ...]] = {}
      for document, grade in grades.items():
        if grade > 0 and document in answers:
          name, positions = answers[document]
          joined = (*found.get(name, ()), *positions)
          found[name] = tuple(dict.fromkeys(joined))
      if found:
        yield Question(
          id=query,
          text=queries[query].text,
          split=split,
          answers=found,
          client=queries[query].client,
        )


def _check_answers(question: Question, sizes: Mapping[str, int]) -> None:
  """Refuses answers that are not there."""
  for name, positions in question.answers.items():
    size = sizes.get(name, 0)
    if not positions or min(positions) < 0 or max(positions) >= size:
      raise ValueError(
        f"expected answers among the sentences of a passage, got {positions} "
        f"of {size} in {name!r}; correct them"
      )
  if not question.answers:
    raise ValueError(
      f"expected an answer to each question, got none to {question.id!r}; "
      "leave it out"
    )
