"""SentencePiece models with the special ids of models in the wild."""

import io
import pathlib

import sentencepiece

RUT5 = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
"""Of ruT5."""
T5 = {"pad_id": 0, "bos_id": -1, "eos_id": 1, "unk_id": 2}
"""Of T5, T5 1.1 and mT5."""
DEFAULT = {"pad_id": -1, "bos_id": 1, "eos_id": 2, "unk_id": 0}
"""Of whoever changes nothing of SentencePiece's."""
TEXTS = (
  "The array holds numbers in rows and columns.",
  "A matrix is an array of two dimensions, rows first.",
  "The river rises in the mountains and ends in the northern sea.",
  "Ships go up the river as far as the old bridge, then they turn round.",
  "What is 0123456789 or 9876543210?",
)


def write(path: pathlib.Path, ids: dict[str, int], **options) -> pathlib.Path:
  """Trains a model on `TEXTS`."""
  options = {"vocab_size": 80, "hard_vocab_limit": False} | options
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS * 3),
    model_writer=model,
    minloglevel=2,
    num_threads=1,
    **ids,
    **options,
  )
  path.write_bytes(model.getvalue())
  return path
