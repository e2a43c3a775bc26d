import math

import numpy as np
import pytest
import small_vocabularies

from synthq_jax.data import pretrain_tasks, vocabulary

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
  records = pretrain_tasks.records_of(PASSAGES[:4])
  texts = [" ".join(passage) for passage in PASSAGES[:4]]
  asked = ["What is it?", "Is it?", "Why?", "How is it?"]
  for kind in ("heading", "question", "rule", "summary"):
    pairs = zip(asked, texts, strict=True)
    records += [pretrain_tasks.Record(kind, q, text) for q, text in pairs]
  return pretrain_tasks.tokenize(words, records)


def make(data, task, seed=0, **lengths):
  lengths = LENGTHS | lengths
  return pretrain_tasks.make(
    data,
    task,
    pretrain_tasks.rows_of(data, task, lengths["target_length"]),
    rng=np.random.default_rng(seed),
    **lengths,
  )


def ids(row):
  return row[row > 0].tolist()


def unpadded(row):
  """Returns the ids before the EOS, behind which all is padding."""
  row = row.tolist()
  end = row.index(vocabulary.EOS_ID)
  assert not any(row[end + 1 :])
  return row[:end]


def head_of(data, task):
  return ids(data.prefixes[list(pretrain_tasks.PREFIXES).index(task)])


def rows(data, task, examples):
  """Returns (input without prefix, target) of every example."""
  head = head_of(data, task)
  for source, target in zip(*examples, strict=True):
    source = unpadded(source)
    assert source[: len(head)] == head
    yield source[len(head) :], unpadded(target)


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


def test_records_prefixes_and_sentinels_are_tokenized(words, data):
  index = pretrain_tasks.KINDS.index("rule")
  first = np.flatnonzero(data.kinds == index)[0]
  assert ids(data.queries[first]) == words.encode("What is it?")
  text = words.encode(" ".join(PASSAGES[0]))
  assert ids(data.passages[first]) == text[: data.passages.shape[1]]
  assert head_of(data, "question") == words.encode("generate_query: ")
  assert head_of(data, "heading") == words.encode("title: ")
  assert data.sentinels.tolist() == list(range(97, 89, -1))
  assert words.vocab_size == 98


def test_a_query_too_long_for_the_cache_leaves_it_with_its_record(words):
  record = pretrain_tasks.Record("question", "long " * 40, "Some text.")
  fits = pretrain_tasks.Record("question", "Why?", "Some text.")
  assert len(pretrain_tasks.tokenize(words, [record, fits]).kinds) == 1


def test_a_cache_is_the_same_after_it_was_saved(data, tmp_path):
  data.save(tmp_path / "tokens.npz")
  again = pretrain_tasks.Cache.load(tmp_path / "tokens.npz")
  for name in ("passages", "queries", "kinds", "prefixes", "sentinels"):
    before, after = getattr(data, name), getattr(again, name)
    np.testing.assert_array_equal(before, after)
    assert before.dtype == after.dtype


@pytest.mark.parametrize("task", list(pretrain_tasks.PREFIXES))
@pytest.mark.parametrize(("source", "target"), [(40, 24), (26, 14), (90, 60)])
def test_examples_have_the_asked_shape_and_end_with_eos(
  data, task, source, target
):
  made = make(data, task, input_length=source, target_length=target)
  inputs, targets = made
  count = len(inputs)
  assert inputs.shape == (count, source)
  assert targets.shape == (count, target)
  assert inputs.dtype == targets.dtype == np.int32
  if task not in ("sentence", "keywords"):  # too long for these pieces
    assert count >= 2
  for body, wanted in rows(data, task, made):
    assert body and wanted


@pytest.mark.parametrize("task", ["copy", "fill"])
def test_examples_depend_on_the_generator_alone(data, task):
  first, again = make(data, task), make(data, task)
  for one, other in zip(first, again, strict=True):
    np.testing.assert_array_equal(one, other)
  others = [make(data, task, seed=seed)[0] for seed in range(1, 6)]
  assert not all(np.array_equal(first[0], other) for other in others)


def test_a_copied_target_is_a_window_of_the_input(data):
  bodies, targets = set(), set()
  chosen = pretrain_tasks.rows_of(data, "copy", 12)
  for seed in range(10):
    made = make(data, "copy", seed, target_length=12)
    for row, (body, target) in zip(
      chosen, rows(data, "copy", made), strict=True
    ):
      assert is_window(target, body) and len(target) == 11
      assert is_window(body, ids(data.passages[row]))
      bodies.add(tuple(body))
      targets.add(tuple(target))
  assert len(bodies) > 8 and len(targets) > 8


def test_a_filled_input_is_the_original(data):
  sentinels = set(data.sentinels.tolist())
  chosen = pretrain_tasks.rows_of(data, "fill", 24)
  for seed in range(10):
    made = make(data, "fill", seed)
    for row, (body, target) in zip(
      chosen, rows(data, "fill", made), strict=True
    ):
      spans, current = {}, None
      for token in target:
        if token in sentinels:
          current = spans.setdefault(token, [])
        else:
          current.append(token)
      gaps = [token for token in body if token in sentinels]
      assert gaps == list(spans) == data.sentinels[: len(gaps)].tolist()
      restored = [t for token in body for t in spans.get(token, [token])]
      assert is_window(restored, ids(data.passages[row]))
      hidden = sum(map(len, spans.values()))
      assert hidden == 3 * len(gaps) > 0
      assert 0.05 < hidden / len(restored) < 0.25


def test_the_shortest_target_has_one_gap(data):
  for body, target in rows(data, "fill", make(data, "fill", target_length=5)):
    assert len(target) == 4 and target[0] == data.sentinels[0]
    assert body.count(target[0]) == 1


def test_gaps_lie_at_different_places(data):
  places = [make(data, "fill", seed)[0][0].tolist() for seed in range(5)]
  assert len(set(map(tuple, places))) > 1


def test_a_query_is_the_target_of_its_own_passage(words, data):
  made = make(data, "question", input_length=120)
  found = list(rows(data, "question", made))
  asked = ["What is it?", "Is it?", "Why?", "How is it?"]
  assert [target for _, target in found] == [words.encode(q) for q in asked]
  for (body, _), passage in zip(found, PASSAGES, strict=False):
    assert is_window(body, words.encode(" ".join(passage)))


def test_keywords_are_the_telling_words_in_their_order():
  passages = [
    ("The zebra and the lion saw the crane.", "Zebra, lion, crane: all at"),
    ("The otter and the mole saw the heron.", "Otter, mole, heron: all by"),
  ]
  records = pretrain_tasks.records_of(passages)
  # Words of both passages weigh nothing: the first two of them fill the five.
  assert [r.query for r in records if r.kind == "keywords"] == [
    "the zebra and lion crane",
    "the otter and mole heron",
  ]
  assert [r.passage for r in records if not r.kind] == [
    " ".join(passage) for passage in passages
  ]


def test_a_telling_sentence_stays_in_every_second_passage():
  records = pretrain_tasks.records_of([PASSAGES[1]] * 2 + [PASSAGES[0]] * 9)
  first, second = [
    r for r in records if "apples" in r.query and r.kind == "sentence"
  ]
  assert first.query == second.query and first.query in PASSAGES[1]
  assert first.query in first.passage
  assert first.query not in second.passage


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


def test_a_query_that_does_not_fit_the_target_makes_no_example(words, data):
  lengths = [len(words.encode(q)) for q in ("What is it?", "Why?")]
  few = pretrain_tasks.rows_of(data, "question", lengths[0])
  assert 0 < len(few) < len(pretrain_tasks.rows_of(data, "question", 24)) == 4
  assert not len(pretrain_tasks.rows_of(data, "question", lengths[1]))


@pytest.mark.parametrize("task", ["copy", "keywords"])
def test_examples_end_with_the_end_of_their_own_vocabulary(task, tmp_path):
  """ruT5's </s> is 2."""
  path = small_vocabularies.write(tmp_path / "v", small_vocabularies.RUT5)
  records = pretrain_tasks.records_of(PASSAGES[:4])
  pretrain_tasks.tokenize(vocabulary.load(path), records).save(
    tmp_path / "c.npz"
  )
  cache = pretrain_tasks.Cache.load(tmp_path / "c.npz")
  for rows in make(cache, task, target_length=60):
    lasts = np.count_nonzero(rows, axis=1) - 1
    assert (rows[np.arange(len(rows)), lasts] == 2).all()
    assert (rows != 1).all()
