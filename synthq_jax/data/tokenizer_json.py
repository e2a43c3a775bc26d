"""Writes a SentencePiece vocabulary as a tokenizer.json of Hugging Face.

Libraries that read it produce the ids of `vocabulary.tokenize`. Text stays text:
`</s>`, `<pad>` or `<extra_id_0>` in a document is tokenized like any other text,
as in training. Hugging Face's tokenizers do two things that would change this: a
unigram model matches its special pieces in texts, and sentinels are appended for
which the model may have no rows. So special pieces get names with a leading space,
which no normalized text holds, and there are no sentinels.
"""

import base64
import json
import os
import pathlib
import re
from typing import Any

from synthq_jax import extras
from synthq_jax.data import vocabulary
from synthq_jax.models import token_ids as token_ids_lib

__all__ = ["check", "find_added", "not_text", "write"]

_UNKNOWN, _CONTROL, _BYTE, _NORMAL = 2, 3, 6, 1  # types of pieces in the model
_UNIGRAM = 1
_SENTINEL = re.compile(r"<extra_id_\d+>")


def write(
  folder: pathlib.Path,
  path: str | os.PathLike,
  *,
  rows: int,
  max_length: int,
  cut_at: int | None = None,
) -> None:
  """Writes spiece.model, tokenizer.json and tokenizer_config.json.

  The ids differ from SentencePiece's in two cases. After a character that has a
  simpler form, the library drops a combining mark. And two tokenizations may score
  the same up to the last bits of single precision (1 in 16,700 texts of
  documentation and the web).

  Args:
    folder: the folder of a Hugging Face checkpoint.
    path: a SentencePiece unigram model.
    rows: number of rows of the checkpoint's embedding.
    max_length: the largest number of tokens of a text, EOS included, unless its
      reader sets another one.
    cut_at: number of tokens to which the tokenizer itself truncates a text, for
      readers that do not truncate; None: all tokens are kept.

  Raises:
    ValueError: if the model is of another kind, or has more pieces than `rows`.
  """
  model, pieces = _read(path)
  if (number := len(model.pieces)) > rows:
    raise ValueError(
      f"{path}: expected at most {rows} pieces, as the checkpoint has, got"
      f" {number}: put its own vocabulary into its folder"
    )
  ids = pieces.token_ids
  special = {
    "pad_token": _get_name(model.pieces[ids.pad]),
    "eos_token": _get_name(model.pieces[ids.eos]),
    "unk_token": _get_name(model.pieces[ids.unk]),
  }
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **special,
    "model_max_length": max_length,
    "split_special_tokens": True,  # special pieces in texts are text
    "clean_up_tokenization_spaces": False,
  }
  texts = {
    "tokenizer.json": json.dumps(
      _translate_model(model, ids, cut_at), ensure_ascii=False
    ),
    "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
  }
  for name, text in texts.items():
    (folder / name).write_text(text, encoding="utf-8")
  (folder / "spiece.model").write_bytes(pathlib.Path(path).read_bytes())


def check(path: str | os.PathLike) -> None:
  """Refuses a vocabulary that `write` would refuse.

  Raises:
    ValueError: if the model is of another kind.
  """
  _read(path)


def find_added(
  folder: str | os.PathLike, pieces: vocabulary.SentencePiece
) -> list[str]:
  """Finds the tokens that a Hugging Face folder adds to its SentencePiece model.

  `vocabulary.SentencePiece` reads these tokens as text. Sentinels do not count.

  Args:
    folder: the folder of a checkpoint, with or without files of a tokenizer.
    pieces: the vocabulary to be used with the checkpoint.

  Returns:
    The added tokens, in the order of their ids.

  Raises:
    ValueError: if a file is damaged, or gives an id of the vocabulary to another
      piece.
  """
  folder, added = pathlib.Path(folder), {}
  for path in (folder / "tokenizer.json", folder / "added_tokens.json"):
    if not path.is_file():
      continue
    try:
      names = _read_names(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{path}: expected a tokenizer of Hugging Face, got something else"
        f" ({type(error).__name__}): copy it again, or delete it"
      ) from error
    size = pieces.tokenizer.get_piece_size()
    for number, name in sorted(names.items()):
      own = number < size and pieces.tokenizer.id_to_piece(number)
      if own and _strip(own) != _strip(name):
        raise ValueError(
          f"{path}: expected the pieces of {pieces.path}, got {name!r} for {own!r}"
          f" at id {number}: give the SentencePiece model of this checkpoint"
        )
      if not own and not _SENTINEL.fullmatch(_strip(name)):
        added[number] = name
  return [added[number] for number in sorted(added)]


def _read_names(content: dict[str, Any]) -> dict[int, str]:
  """Returns the pieces by id, of tokenizer.json or of added_tokens.json."""
  if "model" not in content:
    return {number: name for name, number in content.items()}
  pieces = content["model"]["vocab"]
  if isinstance(pieces, dict):
    names = {number: name for name, number in pieces.items()}
  else:
    names = {number: name for number, (name, *_) in enumerate(pieces)}
  added = content.get("added_tokens") or ()
  return names | {token["id"]: token["content"] for token in added}


def _strip(name: str) -> str:
  """Strips a special piece of the space that some files write before it."""
  bare = name.lstrip(" \u2581")
  return bare if re.fullmatch(r"<.+>", bare) else name


def not_text(path: str | os.PathLike, rows: int) -> list[int]:
  """Returns the ids that no text holds: unknown, sentinels, rows without a piece.

  Args:
    path: a SentencePiece unigram model.
    rows: number of rows of the checkpoint's embedding.

  Raises:
    ValueError: as `check` does.
  """
  model, pieces = _read(path)
  return [pieces.unk_id, *pieces.sentinels, *range(len(model.pieces), rows)]


def _read(
  path: str | os.PathLike,
) -> tuple[Any, vocabulary.SentencePiece]:
  """Reads the model as a proto and as a vocabulary; refuses other kinds of
  models."""
  with extras.required("run"):
    from sentencepiece import sentencepiece_model_pb2

  model = sentencepiece_model_pb2.ModelProto()
  try:
    model.ParseFromString(pathlib.Path(path).read_bytes())
  except Exception as error:  # protobuf's error classes differ by version
    raise ValueError(
      f"{path}: expected a SentencePiece model, got another file"
    ) from error
  pieces = vocabulary.load(path)
  spec = model.trainer_spec
  sentinels = set(pieces.sentinels)
  kinds = {
    piece.type
    for position, piece in enumerate(model.pieces)
    if position not in sentinels
  }
  is_ours = (
    spec.model_type == _UNIGRAM
    and not spec.treat_whitespace_as_suffix
    and kinds <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}
    and pieces.tokenizer.pad_id() >= 0
  )
  if not is_ours:
    raise ValueError(
      f"{path}: expected a unigram SentencePiece model that has <pad>, </s> and"
      " <unk> and no user-defined pieces, got another kind: export in"
      " another format, and add its tokenizer"
    )
  return model, pieces


def _translate_model(
  model: Any, ids: token_ids_lib.TokenIds, cut_at: int | None
) -> dict[str, Any]:
  """Translates a model: normalizer, splitter, pieces, and an EOS after each
  text."""
  normalizer = model.normalizer_spec
  steps: list[dict[str, Any]] = []
  if charsmap := normalizer.precompiled_charsmap:
    text = base64.b64encode(charsmap).decode()
    steps.append({"type": "Precompiled", "precompiled_charsmap": text})
  if normalizer.remove_extra_whitespaces:
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    several = {"Regex": " {2,}"}
    steps.append({"type": "Replace", "pattern": several, "content": " "})
  spaces = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": "always" if normalizer.add_dummy_prefix else "never",
    "split": model.trainer_spec.split_by_whitespace,
  }
  end = _get_name(model.pieces[ids.eos])
  first, second = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
  special = {"SpecialToken": {"id": end, "type_id": 0}}
  return {
    "version": "1.0",
    "truncation": cut_at
    and {
      "direction": "Right",
      "max_length": cut_at,
      "strategy": "LongestFirst",
      "stride": 0,
    },
    "padding": None,
    "added_tokens": [],
    "normalizer": {"type": "Sequence", "normalizers": steps},
    "pre_tokenizer": spaces,
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [first, special],
      "pair": [first, special, second, special],
      "special_tokens": {end: {"id": end, "ids": [ids.eos], "tokens": [end]}},
    },
    "decoder": spaces,
    "model": {
      "type": "Unigram",
      "unk_id": ids.unk,
      "vocab": [[_get_name(piece), piece.score] for piece in model.pieces],
      "byte_fallback": model.trainer_spec.byte_fallback,
    },
  }


def _get_name(piece: Any) -> str:
  is_special = piece.type in (_UNKNOWN, _CONTROL)
  return f" {piece.piece}" if is_special else piece.piece
