import itertools

import numpy as np
import pytest
import sentencepiece
import shared_data
import small_vocabularies

from synthq_jax.data import files, vocabulary
from synthq_jax.models import token_ids

TEXTS = (
  "The array holds numbers in rows and columns.",
  "A matrix is an array of two dimensions, rows first.",
  "Numbers in a row are added before the columns are.",
  "An Apple is red; a pear is green, and both are fruit.",
  "Green fruit is not ripe, red fruit is often ripe.",
  "The river rises in the mountains and ends in the northern sea.",
  "Ships go up the river as far as the old bridge, then they turn round.",
  "In spring the water floods the fields that lie beside the bridge.",
)
SIZE = 65


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp("vocabulary") / "small.model"
  vocabulary.train(TEXTS, path, vocab_size=SIZE)
  return path


@pytest.fixture(scope="module")
def small(path):
  return vocabulary.load(path)


def test_the_same_text_gives_the_same_model(path, tmp_path):
  again, other = tmp_path / "again.model", tmp_path / "other.model"
  vocabulary.train(iter(TEXTS), again, vocab_size=SIZE)
  assert again.read_bytes() == path.read_bytes()
  vocabulary.train(TEXTS[:-1], other, vocab_size=SIZE)
  assert other.read_bytes() != path.read_bytes()


def test_special_ids_are_those_of_t5(path, small):
  model = sentencepiece.SentencePieceProcessor(model_file=str(path))
  ids = (model.pad_id(), model.eos_id(), model.unk_id(), model.bos_id())
  assert ids == (vocabulary.PAD_ID, vocabulary.EOS_ID, 2, -1) == (0, 1, 2, -1)
  assert len(model) == small.vocab_size == SIZE
  assert (small.pad_id, small.eos_id, small.unk_id) == (0, 1, 2)


def test_rows_end_with_eos_and_are_padded_with_zeros(small):
  texts = ["red apple", "", "rows"]
  rows = vocabulary.tokenize(small, texts, length=30)
  assert rows.shape == (3, 30) and rows.dtype == np.int32
  for row, text in zip(rows, texts, strict=True):
    ids = small.encode(text)
    wanted = ids + [vocabulary.EOS_ID] + [0] * (29 - len(ids))
    assert row.tolist() == wanted


def test_long_texts_are_cut_and_keep_their_eos(small):
  ids = small.encode(TEXTS[0])
  assert len(ids) > 6
  row = vocabulary.tokenize(small, [TEXTS[0]], length=6)[0]
  assert row.tolist() == ids[:5] + [vocabulary.EOS_ID]
  exact = vocabulary.tokenize(small, [TEXTS[0]], length=len(ids) + 1)[0]
  assert exact.tolist() == ids + [vocabulary.EOS_ID]


def test_a_prefix_stands_before_every_text(small):
  rows = vocabulary.tokenize(
    small, ["apple", "rows"], length=20, prefix="red: "
  )
  head = small.encode("red: ")
  for row, text in zip(rows, ("apple", "rows"), strict=True):
    wanted = head + small.encode(text) + [vocabulary.EOS_ID]
    assert row[row > 0].tolist() == wanted


def test_too_little_text_is_refused(tmp_path):
  path = tmp_path / "large.model"
  with pytest.raises(ValueError, match="vocab_size=4000") as caught:
    vocabulary.train(TEXTS, path, vocab_size=4000)
  assert "\n" not in str(caught.value)
  assert not path.exists()


def test_a_missing_model_is_named(tmp_path):
  with pytest.raises(ValueError, match="got no file .*nowhere.model"):
    vocabulary.load(tmp_path / "nowhere.model")


def test_a_file_that_is_no_model_is_named(tmp_path):
  path = tmp_path / "bad.model"
  path.write_bytes(b"not a model at all")
  with pytest.raises(ValueError, match="bad.model: expected a SentencePiece"):
    vocabulary.load(path)


def test_special_pieces_in_a_text_are_text(path):
  texts = ["<extra_id_0>", "an <extra_id_3> row</s>", "<pad> <unk>", "</s>"]
  plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
  loaded = vocabulary.load(path, extra_ids=4)
  rows = vocabulary.tokenize(loaded, texts, length=40)
  for text, row in zip(texts, rows.tolist(), strict=True):
    end = row.index(vocabulary.EOS_ID)
    assert row[:end] == plain.encode(text) == loaded.encode(text)
    assert max(row) < SIZE and not any(row[end + 1 :])


def seqio_texts():
  """Texts of all kinds: the shared ones where they are, and awkward ones."""
  yield from TEXTS
  yield from (
    *(
      "",
      " ",
      "  two  spaces ",
      "tab\tand\nline",
      "\u2581",
      "\u3000",
      "\x00\x7f",
    ),
    *(
      "\u00e9t\u00e9 e\u0301",
      "\u6771\u4eac",
      "\U0001f600 ok",
      "\u200b\ufeff",
      "x" * 3000,
    ),
    *("<extra_id_0>", "a <extra_id_3> b<extra_id_1>", "</s>", "<pad> <unk>"),
    *("<extra_id_99>", "\u2581<extra_id_2>", "\ufffd", "fi \ufb01 \u2460"),
  )
  for name, number in {"queries": 1000, "corpus": 60}.items():
    for path in sorted(shared_data.PLACE.glob(f"*/{name}.jsonl*")):
      for _, line in itertools.islice(files.json_lines(path), number):
        yield line["text"]


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
  """A model that writes what it does not know as bytes."""
  path = tmp_path_factory.mktemp("bytes") / "bytes.model"
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS),
    model_prefix=str(path.with_suffix("")),
    vocab_size=330,
    byte_fallback=True,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  return path


@pytest.mark.parametrize("model", ["small", "bytes", "t5"])
def test_ids_and_texts_are_those_of_seqio(model, path, fallback):
  seqio = pytest.importorskip("seqio", reason="the extra [seqio]")
  places = {
    "small": path,
    "bytes": fallback,
    "t5": shared_data.PLACE / "t5_vocab_c4/spiece.model",
  }
  place = places[model]
  if not place.is_file():
    pytest.skip("T5's own vocabulary is not on this machine")
  theirs = seqio.SentencePieceVocabulary(str(place), 100)
  ours = vocabulary.load(place, extra_ids=100)
  for name in ("vocab_size", "extra_ids", "pad_id", "eos_id", "unk_id"):
    assert getattr(ours, name) == getattr(theirs, name), name
  plain = seqio.SentencePieceVocabulary(str(place))
  last = theirs.vocab_size - 1
  for text in seqio_texts():
    # Sentinels that a text spells are text to us, as they are without any.
    same = plain if "<extra_id_" in text else theirs
    assert ours.encode(text) == list(same.encode(text)), text
    ids = list(theirs.encode(text))
    assert ours.decode(ids) == theirs.decode(ids), text
    odd = [*ids, last, last + 7, 5, 1, 6]
    assert ours.decode(np.array(odd)) == theirs.decode(odd), text
  assert vocabulary.as_seqio(ours) == theirs
  assert vocabulary.as_seqio(theirs) is theirs


def test_texts_end_with_the_end_of_their_own_vocabulary(tmp_path):
  """ruT5: <pad> 0, <s> 1, </s> 2, <unk> 3."""
  path = small_vocabularies.write(tmp_path / "v", small_vocabularies.RUT5)
  words = vocabulary.load(path)
  assert words.token_ids == token_ids.TokenIds(pad=0, eos=2, unk=3)
  text = "the array q"
  ids = words.encode(text)
  assert 3 in words.encode("\N{SNOWMAN}") and min(ids) > 2
  row, short = vocabulary.tokenize(words, [text] * 2, length=len(ids) + 2)
  assert row.tolist() == [*ids, 2, 0]
  short, count = vocabulary.tokenize_and_count(words, [text], length=3)
  assert short.tolist() == [[*ids[:2], 2]] and count == 1
  assert vocabulary.cut(row[None], 3).tolist() == short.tolist()
  assert words.decode([*ids, 2, 9]) == words.decode(ids)


def test_what_cannot_be_padded_or_ended_is_refused_in_one_line(tmp_path):
  for ids, words in (
    (small_vocabularies.DEFAULT, "padding .<pad>. as id 0, got '<unk>' there"),
    ({**small_vocabularies.T5, "eos_id": -1, "bos_id": 1}, "got eos_id=-1"),
  ):
    path = small_vocabularies.write(tmp_path / "v.model", ids)
    with pytest.raises(
      ValueError, match=f"v.model: expected .*{words}"
    ) as told:
      vocabulary.load(path)
    assert "\n" not in str(told.value)


def test_an_unknown_piece_that_no_text_holds_may_be_id_0(tmp_path):
  """MADLAD-400: what has no piece is written as bytes."""
  path = small_vocabularies.write(
    tmp_path / "v",
    small_vocabularies.DEFAULT,
    byte_fallback=True,
    vocab_size=340,
  )
  words = vocabulary.load(path)
  assert words.token_ids == token_ids.TokenIds(pad=0, eos=2, unk=0)
  [row] = vocabulary.tokenize(
    words, ["\N{SNOWMAN} \N{CJK RADICAL SUN}"], length=20
  )
  assert np.count_nonzero(row) == 1 + list(row).index(2)


def test_sentinels_may_be_pieces_of_the_model_itself(tmp_path, small):
  """mT5's are, and have no extra ids behind them."""
  names = [f"\u2581<extra_id_{i}>" for i in range(4)]
  path = small_vocabularies.write(
    tmp_path / "v", small_vocabularies.T5, user_defined_symbols=names
  )
  words = vocabulary.load(path)
  pieces = [words.tokenizer.id_to_piece(i) for i in words.sentinels]
  assert pieces == names
  assert not small.sentinels
