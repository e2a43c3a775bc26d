"""Encodes texts: encoders of this library, of sentence-transformers, GPT-2.

MAUVE takes vectors of any of them. Each is a frozen dataclass with one method,
`encode`, and a `description`, which goes into results, since vectors of different
encoders are not comparable. All encoders read local folders; nothing is ever
downloaded.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from synthq_jax import extras
from synthq_jax.data import sentence_tokens, shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import sentence_encoder, t5_checkpoints
from synthq_jax.retrieval import encode as encode_lib

__all__ = ["FlaxEncoder", "Gpt2", "load_folder", "load_own"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlaxEncoder:
  """An encoder of this library, with its tokenizer.

  Formal guarantee:
    None of its own: vectors of private texts are private, and so are the vectors
    of an encoder that was trained on private texts without noise.
  """

  description: str
  """A short description, without paths of this machine."""
  params: Any = dataclasses.field(repr=False)
  """The encoder's parameters."""
  config: Any
  """The shape of the parameters, any config of `models.encoders`."""
  tokenize: Callable[[Sequence[str]], np.ndarray] = dataclasses.field(
    repr=False
  )
  """Function from texts to tokens [text, length]."""

  def encode(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes each text as one float32 vector of norm 1."""
    tokens = self.tokenize(texts)
    return encode_lib.encode(self.params, self.config, tokens)


def load_own(
  checkpoint: str | os.PathLike = shipped.DIRECTORY,
  vocabulary: str | os.PathLike = shipped.VOCABULARY,
  *,
  length: int = 128,
) -> FlaxEncoder:
  """Loads the dual encoder of a T5 checkpoint; by default of the shipped one.

  Formal guarantee:
    None, see `FlaxEncoder`. To grade queries, give it a public checkpoint: one that
    was fine-tuned on the private queries would grade itself.

  Args:
    checkpoint: a T5 checkpoint, in any format that `t5_checkpoints.load` reads.
    vocabulary: the SentencePiece model of the checkpoint.
    length: the most tokens of a text, EOS included; longer texts are cut.

  Raises:
    ValueError: if a file is missing or damaged, or the vocabulary has more pieces
      than the model has embeddings.
  """
  pieces = vocabulary_lib.load(vocabulary)
  params, config = t5_checkpoints.load(checkpoint, token_ids=pieces.token_ids)
  if pieces.vocab_size > config.vocab_size:
    raise ValueError(
      f"{vocabulary}: expected at most vocab_size={config.vocab_size} pieces, as"
      f" {checkpoint} has, got {pieces.vocab_size}: give its own vocabulary"
    )
  return FlaxEncoder(
    description=f"dual encoder of {pathlib.Path(checkpoint).resolve().name}",
    params=params,
    config=config,
    tokenize=functools.partial(vocabulary_lib.tokenize, pieces, length=length),
  )


def load_folder(folder: str | os.PathLike, *, length: int = 64) -> FlaxEncoder:
  """Loads an encoder of sentence-transformers, or a plain BERT, to run in Flax.

  Texts get the folder's default prompt and letter case, as in
  sentence-transformers' `encode`.

  Args:
    folder: a folder that `models.sentence_encoder.load` reads, with its tokenizer.
    length: the most tokens of a text, special tokens included, unless the folder
      allows fewer; longer texts are cut.

  Raises:
    ValueError: if a file is missing or damaged, or files do not fit together.

  References:
    Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, section 3.
  """
  tokens = sentence_tokens.load(folder, length=length)
  params, config = sentence_encoder.load(folder)
  sentence_tokens.check(folder, tokens, config)
  return FlaxEncoder(
    description=f"vectors of {pathlib.Path(folder).resolve().name}",
    params=params,
    config=config,
    tokenize=tokens.rows,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2:
  """Encodes a text as GPT-2's last hidden state at the last token, as in MAUVE.

  MAUVE's authors use gpt2-large with up to 1,024 tokens; another size gives other
  scores. Any causal language model that transformers reads works.

  References:
    Pillutla et al. 2021, MAUVE, section 4 and appendix A.
  """

  folder: str | os.PathLike
  """A Hugging Face folder with config.json, weights and tokenizer."""
  max_length: int = 1024
  """The most tokens of a text; longer texts are cut."""
  batch_size: int = 8
  """The number of texts at a time; changes vectors by rounding alone."""

  @property
  def description(self) -> str:
    """A description with the name of the folder."""
    return f"last hidden state of {pathlib.Path(self.folder).resolve().name}"

  def check(self) -> None:
    """Refuses a missing folder or library; `encode` does so before it reads.

    Raises:
      ValueError: if there is no such folder.
      MissingExtraError: if a library is not installed.
    """
    extras.check("transformers", "torch", "transformers")
    if not os.path.isdir(self.folder):
      raise ValueError(
        "expected a folder with a model, got"
        f" folder={os.fspath(self.folder)!r}: no such folder; nothing is"
        " downloaded, so save the model there first"
      )

  def encode(self, texts: Sequence[str]) -> Float[np.ndarray, "text dim"]:
    """Encodes each text as one float32 vector; an empty text is read as an EOS."""
    self.check()
    folder = os.fspath(self.folder)
    with extras.required("transformers"):
      import torch
      import transformers

    transformers.utils.logging.disable_progress_bar()
    local = {"local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
    model = transformers.AutoModel.from_pretrained(folder, **local)
    model = model.float().eval()
    end = tokenizer.eos_token_id or 0
    rows = [
      tokenizer.encode(text, truncation=True, max_length=self.max_length)
      or [end]
      for text in texts
    ]
    vectors = np.zeros((len(rows), model.config.hidden_size), np.float32)
    # Batches of similar lengths save padding.
    order = np.argsort([len(row) for row in rows], kind="stable")
    for start in range(0, len(order), self.batch_size):
      chosen = order[start : start + self.batch_size]
      lengths = np.array([len(rows[i]) for i in chosen])
      ids = vocabulary_lib.pad([rows[i] for i in chosen], lengths.max())
      mask = np.arange(ids.shape[1]) < lengths[:, None]
      with torch.no_grad():
        states = model(
          input_ids=torch.tensor(ids, dtype=torch.int64),
          attention_mask=torch.tensor(mask, dtype=torch.int64),
        ).last_hidden_state
      vectors[chosen] = states[np.arange(len(ids)), lengths - 1]
    return vectors
