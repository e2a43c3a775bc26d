import math

import numpy as np
import pytest

from synthq_jax.data import docstrings, pretrain_tasks, vocabulary

PASSAGES = [
  (
    "An array holds numbers of one type in rows and columns.",
    "Every row of the array has the same length as the others.",
    "A new array shares its memory with the old one unless it is copied.",
    "The columns of an array are numbered from zero.",
  ),
  (
    "Ripe apples are sweet and red.",
    "The farmer picks apples in the autumn before the first frost.",
    "Apples that are red and ripe are sold at the market.",
    "What is left over is pressed and made into juice or sweet cider.",
  ),
  (
    "The river rises in the mountains and ends in the northern sea.",
    "Ships go up the river as far as the old bridge.",
    "In spring the river floods the fields beside the bridge.",
  ),
  (
    "A function maps every element of one set to an element of another.",
    "The inverse of a function exists when no two elements share an image.",
    "Composition of two functions is again a function of one element.",
  ),
  ("Too short.",),
]
LENGTHS = {"input_length": 40, "target_length": 24}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp("vocabulary") / "tiny.model"
  sentences = [sentence for passage in PASSAGES for sentence in passage]
  vocabulary.train(sentences, path, vocab_size=90)
  return vocabulary.load(path, extra_ids=8)


@pytest.fixture(scope="module")
def data(words):
  return pretrain_tasks.tokenize_passages(words, PASSAGES)


def make(data, task, seed=0, **lengths):
  return pretrain_tasks.make(data, task, seed=seed, **(LENGTHS | lengths))


def unpadded(row):
  """Returns the ids before the EOS, behind which all is padding."""
  row = row.tolist()
  end = row.index(vocabulary.EOS_ID)
  assert not any(row[end + 1 :])
  return row[:end]


def rows(data, task, examples):
  """Returns (input without prefix, target) of every example."""
  head = data.prefixes[task]
  for source, target in zip(examples.inputs, examples.targets, strict=True):
    source = unpadded(source)
    assert source[: len(head)] == head
    yield source[len(head) :], unpadded(target)


def flat(data, index):
  return [token for ids in data.passages[index] for token in ids]


def is_window(part, whole):
  starts = range(len(whole) - len(part) + 1)
  return any(whole[i : i + len(part)] == part for i in starts)


def test_words_weigh_the_log_of_their_inverse_frequency():
  passages = [("A cat.", "The cat!"), ("A dog.",), ("A cat and a dog.",)]
  idf = pretrain_tasks.inverse_frequency(passages)
  assert idf == pytest.approx(
    {
      "a": 0.0,
      "cat": math.log(3 / 2),
      "dog": math.log(3 / 2),
      "the": math.log(3),
      "and": math.log(3),
    }
  )


def test_passages_words_prefixes_and_sentinels_are_tokenized(words, data):
  assert data.passages[2] == [words.encode(s) for s in PASSAGES[2]]
  assert data.word_ids["apples"] == words.encode("apples")
  assert data.prefixes["query"] == words.encode("generate_query: ")
  assert data.sentinels == list(range(97, 89, -1))
  assert words.vocab_size == 98


@pytest.mark.parametrize("task", list(pretrain_tasks.PREFIXES))
@pytest.mark.parametrize(("source", "target"), [(40, 24), (26, 10), (90, 60)])
def test_examples_have_the_asked_shape_and_end_with_eos(
  data, task, source, target
):
  made = make(data, task, input_length=source, target_length=target)
  count = len(made.inputs)
  assert made.inputs.shape == (count, source)
  assert made.targets.shape == (count, target)
  assert made.inputs.dtype == made.targets.dtype == np.int32
  if (task, target) != ("query", 10):  # no sentence is that short
    assert count >= 2
  for body, wanted in rows(data, task, made):
    assert body and wanted


@pytest.mark.parametrize("task", ["copy", "fill", "query"])
def test_examples_depend_on_the_seed_alone(data, task):
  first, again = make(data, task), make(data, task)
  np.testing.assert_array_equal(first.inputs, again.inputs)
  np.testing.assert_array_equal(first.targets, again.targets)
  others = [make(data, task, seed=seed).inputs for seed in range(1, 6)]
  assert not all(np.array_equal(first.inputs, other) for other in others)


def test_a_copied_target_is_a_window_of_the_input(data):
  bodies, targets = set(), set()
  for seed in range(10):
    made = make(data, "copy", seed, target_length=12)
    for index, (body, target) in enumerate(rows(data, "copy", made)):
      assert is_window(target, body) and len(target) == 11
      assert is_window(body, flat(data, index))
      bodies.add(tuple(body))
      targets.add(tuple(target))
  assert len(bodies) > 8 and len(targets) > 8
  assert len(made.inputs) == 4  # the last passage is too short


def test_a_filled_input_is_the_original(data):
  sentinels = set(data.sentinels)
  for seed in range(10):
    made = make(data, "fill", seed)
    for index, (body, target) in enumerate(rows(data, "fill", made)):
      spans, current = {}, None
      for token in target:
        if token in sentinels:
          current = spans.setdefault(token, [])
        else:
          current.append(token)
      gaps = [token for token in body if token in sentinels]
      assert gaps == list(spans) == data.sentinels[: len(gaps)]
      restored = [t for token in body for t in spans.get(token, [token])]
      assert is_window(restored, flat(data, index))
      hidden = sum(map(len, spans.values()))
      assert hidden == 3 * len(gaps) > 0
      assert 0.05 < hidden / len(restored) < 0.25


def test_gaps_lie_at_different_places(data):
  places = [make(data, "fill", seed).inputs[0].tolist() for seed in range(5)]
  assert len(set(map(tuple, places))) > 1


def test_keywords_are_the_telling_words_in_their_order(words):
  passages = [
    ("The zebra and the lion saw the crane.", "Zebra, lion, crane: all at"),
    ("The otter and the mole saw the heron.", "Otter, mole, heron: all by"),
  ]
  data = pretrain_tasks.tokenize_passages(words, passages)
  made = make(data, "keywords", input_length=120, target_length=80)
  (_, target), (_, other) = rows(data, "keywords", made)
  # Words of both passages weigh nothing: the first two of them fill the five.
  keywords = ["the", "zebra", "and", "lion", "crane"]
  assert target == [i for word in keywords for i in words.encode(word)]
  keywords = ["the", "otter", "and", "mole", "heron"]
  assert other == [i for word in keywords for i in words.encode(word)]


def test_keywords_stand_in_the_input_in_the_order_of_the_target(words, data):
  made = make(data, "keywords", input_length=250, target_length=90)
  for body, target in rows(data, "keywords", made):
    text = docstrings.words(words.decode(body))
    keywords = words.decode(target).split()
    positions = [text.index(word) for word in keywords]
    assert len(keywords) == 5 and positions == sorted(positions)


SENTENCES = (
  "The cat sat on the red mat today.",  # cat, mat, red, the: 4 of 7 words
  "A cat likes a mat that is red.",  # cat, mat, red: 3 of 7 words
  "Dogs run across the wide field every single morning.",  # the: 1 of 9
)
EVEN = dict.fromkeys(" ".join(SENTENCES).lower().replace(".", "").split(), 1.0)


def test_the_telling_sentence_shares_most_weight_with_the_others():
  telling = pretrain_tasks.telling_sentence
  assert telling(SENTENCES, EVEN) == 0
  assert telling(SENTENCES[::-1], EVEN) == 2
  # Without the words cat and mat: 2 of 5 words against 1 of 5 and 1 of 9.
  assert telling(SENTENCES, EVEN | {"cat": 0, "mat": 0}) == 0
  # Without "the": 3 of 6 words against 3 of 7; a heavy "sat" turns that round.
  assert telling(SENTENCES, EVEN | {"the": 0, "sat": 9}) == 1


def test_the_telling_sentence_must_reach_the_share_asked_for():
  telling = pretrain_tasks.telling_sentence
  assert telling(SENTENCES, EVEN, min_share=4 / 7 - 0.001) == 0
  assert telling(SENTENCES, EVEN, min_share=4 / 7 + 0.001) is None
  nothing_shared = EVEN | dict.fromkeys(("cat", "mat", "red", "the"), 0)
  assert telling(SENTENCES, nothing_shared) is None
  assert telling([], {}) is None


def test_the_telling_sentence_reads_like_one():
  telling = pretrain_tasks.telling_sentence
  first, second, third = SENTENCES
  assert telling((first.rstrip("."), second, third), EVEN) == 1
  long = f"{first[:-1]} {'cat mat red ' * 5}."
  assert telling((long, second, third), EVEN) == 1
  assert telling(("Red cat mat.", third, "A red cat has a mat."), EVEN) == 2
  assert telling((first, second), EVEN) is None  # 8 words are no rest


def test_the_query_is_the_telling_sentence_kept_in_the_input_or_not(data):
  best = pretrain_tasks.telling_sentence(PASSAGES[1], data.idf)
  assert PASSAGES[1][best] == "Ripe apples are sweet and red."
  seen = set()
  for seed in range(20):
    made = make(data, "query", seed, input_length=200, target_length=60)
    position = 0
    for index, passage in enumerate(PASSAGES):
      best = pretrain_tasks.telling_sentence(passage, data.idf)
      if best is None:
        continue
      body, target = list(rows(data, "query", made))[position]
      position += 1
      own = data.passages[index]
      without = [t for i, ids in enumerate(own) if i != best for t in ids]
      assert target == own[best]
      assert body in (without, flat(data, index))
      seen.add((index, body == without))
    assert position == len(made.inputs) >= 2
  assert len(seen) == 2 * position


def test_a_query_that_does_not_fit_makes_no_example(data):
  best = pretrain_tasks.telling_sentence(PASSAGES[1], data.idf)
  size = len(data.passages[1][best])
  target = data.passages[1][best]
  whole = make(data, "query", target_length=size + 1)
  assert target in [t for _, t in rows(data, "query", whole)]
  short = make(data, "query", target_length=size)
  assert target not in [t for _, t in rows(data, "query", short)]
  for _, row in rows(data, "query", short):
    assert row in [ids for passage in data.passages for ids in passage]
