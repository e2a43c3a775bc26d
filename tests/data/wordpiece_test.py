"""Our WordPiece against the tokenizer of transformers."""

import json
import re
import sys

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from synthq_jax.data import wordpiece  # noqa: E402

PIECES = (
  "[PAD] [UNK] [CLS] [SEP] [MASK] the un ##affable ##able river run ##ning ! a"
  " cafe ##s B ##ig , 1 ##2"
).split()
TEXTS = [
  "The unaffable river, running!",
  "Cafés  12 a",
  "Big 中 xyz",
  "",
]


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
  return tmp_path


def theirs(lower=True):
  return transformers.BertTokenizer(
    vocab={piece: place for place, piece in enumerate(PIECES)},
    do_lower_case=lower,
  )


@pytest.mark.parametrize("lower", [True, False])
def test_pieces_are_those_of_transformers(folder, lower):
  settings = {"do_lower_case": lower}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  found, oracle = wordpiece.load(folder), theirs(lower)
  for text in TEXTS:
    expected = oracle(text, add_special_tokens=False)["input_ids"]
    assert found.encode(text) == expected
  assert found.encode("Big") == ([16, 17] if not lower else [1])


def test_texts_are_lower_case_where_nothing_says_otherwise(folder):
  assert wordpiece.load(folder).encode("The") == [5]


def test_rows_begin_and_end_as_bert_wants_them(folder):
  found = wordpiece.load(folder)
  rows = found.rows(TEXTS, length=6)
  oracle = theirs()(TEXTS, padding="max_length", truncation=True, max_length=6)[
    "input_ids"
  ]
  assert rows.tolist() == oracle
  assert (found.cls_id, found.sep_id, found.vocab_size) == (2, 3, len(PIECES))


def test_a_saved_tokenizer_is_read_without_its_padding_and_cut(folder):
  saved = tokenizers.Tokenizer.from_str(theirs().backend_tokenizer.to_str())
  saved.enable_truncation(3)
  saved.enable_padding(length=30)
  saved.save(str(folder / "tokenizer.json"))
  (folder / "vocab.txt").unlink()
  found = wordpiece.load(folder)
  expected = theirs()(TEXTS[0], add_special_tokens=False)["input_ids"]
  assert len(expected) > 3
  assert found.encode(TEXTS[0]) == expected


@pytest.mark.parametrize(
  "spoil,message",
  [
    (lambda d: (d / "vocab.txt").unlink(), "got neither tokenizer.json nor"),
    (
      lambda d: (d / "tokenizer.json").write_text("{"),
      "tokenizer.json: expected the vocabulary of a BERT, got a file that",
    ),
    (
      lambda d: (d / "vocab.txt").write_text("[UNK]\n[PAD]\n[CLS]\n[SEP]\n"),
      "[PAD] as piece 0, got {'[PAD]': 1",
    ),
    (
      lambda d: (d / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n"),
      "'[CLS]': None",
    ),
  ],
)
def test_what_is_no_vocabulary_of_bert_is_refused(folder, spoil, message):
  spoil(folder)
  with pytest.raises(ValueError, match=re.escape(message)):
    wordpiece.load(folder)


def test_a_missing_library_is_named(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(ImportError, match=re.escape("synthq_jax[bert]")):
    wordpiece.load(folder)
