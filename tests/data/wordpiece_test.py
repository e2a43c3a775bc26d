"""Our WordPiece against the tokenizer of transformers."""

import itertools
import json
import re
import sys

import pytest
from hugging_face import tokenizers, transformers

from synthq_jax.data import wordpiece

PIECES = (
  "[PAD] [UNK] [CLS] [SEP] [MASK] the un ##affable ##able river run ##ning ! a"
  " cafe ##s B ##ig , 1 ##2"
).split()
TEXTS = [
  "The unaffable river, running!",
  "Cafés  12 a",
  "Big 中 xyz",
  "हिन्दी the नदी",
  "a 😀 the\u200driver",
  "the\u0000 river\u0007\u00ad run\ufeff",
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


GERMAN = (
  "[PAD] [UNK] [CLS] [SEP] [MASK] \u00fcber uber \u00dcber Uber m\u00f6chte mochte"
  " \u65e5 \u672c \u65e5\u672c ##\u672c [ ] sep"
).split()
STATES = {
  "do_lower_case": (None, True, False),
  "strip_accents": (None, True, False),
  "tokenize_chinese_chars": (None, True, False),
}


def write_tokenizer(folder, settings, inner=None):
  """Writes a vocabulary in either form, beside the settings."""
  (folder / "config.json").write_text('{"model_type": "bert"}')
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  (folder / "vocab.txt").write_text("\n".join(GERMAN) + "\n")
  if inner is not None:
    saved = tokenizers.Tokenizer(
      tokenizers.models.WordPiece.from_file(
        str(folder / "vocab.txt"), unk_token="[UNK]"
      )
    )
    saved.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=inner)
    saved.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    saved.add_special_tokens(GERMAN[:5])
    saved.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()


@pytest.mark.parametrize("inner", [None, True, False])
def test_settings_of_the_tokenizer_are_those_of_transformers(tmp_path, inner):
  """German and Japanese BERTs: accents and characters apart from letter case."""
  seen = set()
  for values in itertools.product(*STATES.values()):
    chosen = dict(zip(STATES, values, strict=True))
    settings = {k: v for k, v in chosen.items() if v is not None}
    write_tokenizer(tmp_path, settings, inner)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = wordpiece.load(tmp_path)
    for text in (
      "\u00dcber m\u00f6chte \u65e5\u672c",
      "uber [SEP] m\u00f6chte",
    ):
      expected = theirs(text, add_special_tokens=False)["input_ids"]
      assert found.encode(text) == expected, settings
      seen.add(tuple(expected))
  assert len(seen) > 8


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast"])
@pytest.mark.parametrize("inner", [True, False])
def test_a_tokenizer_of_no_class_of_its_own_is_read_as_its_file_says(
  tmp_path, kind, inner
):
  settings = {"tokenizer_class": kind, "do_lower_case": not inner}
  write_tokenizer(tmp_path, settings, inner)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = "\u00dcber m\u00f6chte"
  expected = theirs(text, add_special_tokens=False)["input_ids"]
  assert wordpiece.load(tmp_path).encode(text) == expected
  assert (expected == [6, 10]) == inner


def test_sentence_transformers_lower_cases_before_the_tokenizer(tmp_path):
  write_tokenizer(tmp_path, {"do_lower_case": False})
  assert wordpiece.load(tmp_path).encode("\u00dcber") == [7]
  (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
  assert wordpiece.load(tmp_path).encode("\u00dcber") == [5]


@pytest.mark.parametrize(
  "name, content, words",
  [
    (
      "config.json",
      {"tokenizer_class": "BertJapaneseTokenizer"},
      "got tokenizer_class=BertJapaneseTokenizer",
    ),
    ("tokenizer_config.json", {"do_lower_case": "yes"}, "do_lower_case to be"),
    ("tokenizer_config.json", ["x"], "expected a JSON object"),
    ("added_tokens.json", {"[CUSTOM]": 18}, "'[CUSTOM]' among them"),
    (
      "tokenizer_config.json",
      {"added_tokens_decoder": {"18": {"content": "acme"}}},
      "'acme' among them",
    ),
    (
      "sentence_bert_config.json",
      {"tokenizer_args": {"strip_accents": False}},
      "expected no tokenizer_args",
    ),
    (
      "sentence_bert_config.json",
      {"max_seq_length": "long"},
      "max_seq_length and query_length numbers above 0",
    ),
  ],
)
def test_settings_that_are_not_read_are_refused_by_name(
  tmp_path, name, content, words
):
  write_tokenizer(tmp_path, {})
  (tmp_path / name).write_text(json.dumps(content))
  with pytest.raises(ValueError, match=re.escape(words)) as told:
    wordpiece.load(tmp_path)
  assert "\n" not in str(told.value)
