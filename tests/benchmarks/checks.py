"""Measures what it costs that artifacts are checked before they are read.

Prints JSON: for each kind of file processor seconds of the check (size and
SHA-256) and of reading it as stages do, the best of 3, both from memory:
  PYTHONPATH=. python tests/benchmarks/checks.py
"""

import json
import pathlib
import sys
import tempfile
import time

import jax
import measuring
import numpy as np

from synthq_jax.data import beir, files, token_cache
from synthq_jax.models.checkpoints import tensors
from synthq_jax.storage import array_files, file_lists

_ROWS = 200_000
_LENGTH = 64


def seconds(call) -> float:
  """Processor time: other work on the machine does not count."""
  taken = []
  for _ in range(3):
    began = time.process_time()
    call()
    taken.append(time.process_time() - began)
  return min(taken)


def kinds(folder: pathlib.Path) -> dict:
  """Writes a file, or a folder, of each kind; returns how it is read."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 8000, (_ROWS, _LENGTH)).astype(np.int32)
  words = [f"w{i}" for i in range(8000)]
  for name in ("corpus", "arrays", "cache", "checkpoint"):
    (folder / name).mkdir()
  corpus = folder / "corpus" / "corpus.jsonl"
  with corpus.open("w") as stream:
    for number, row in enumerate(tokens):
      text = " ".join(words[i] for i in row)
      stream.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")
  arrays = folder / "arrays" / "tokens.npz"
  array_files.save_npz(arrays, {"tokens": tokens})
  cache = folder / "cache" / "documents"
  with token_cache.writing(cache, _LENGTH, vocab_size=8000) as writer:
    writer.append(tokens, list(map(str, range(_ROWS))))
  tree = {"w": rng.normal(size=(30_000_000,)).astype(np.float32)}
  model = folder / "checkpoint" / "model.safetensors"
  tensors.write_safetensors(model, tensors.of_tree(tree), {})

  def documents() -> None:
    for where, fields in files.json_lines(corpus):
      beir.make_document(where, fields)

  def parameters() -> None:
    jax.block_until_ready(
      tensors.fetch(tensors.read_safetensors(model), None, None)
    )

  return {
    "corpus": documents,
    "arrays": lambda: array_files.read_npz(arrays),
    "cache": lambda: token_cache.load(cache).tokens[np.arange(_ROWS)],
    "checkpoint": parameters,
  }


def main() -> int:
  found = {}
  with tempfile.TemporaryDirectory() as place:
    for name, read in kinds(pathlib.Path(place)).items():
      folder = pathlib.Path(place, name)
      listed = file_lists.list_files(folder)
      check = seconds(
        lambda f=folder, n=listed: file_lists.check_files(f, n, "")
      )
      reading = seconds(read)
      size = sum(size for size, _ in listed.values())
      found[name] = {
        "mib": round(size / 2**20, 1),
        "check_s": round(check, 3),
        "read_s": round(reading, 3),
        "percent_of_reading": round(100 * check / reading, 1),
      }
  return measuring.finish("checks", found)


if __name__ == "__main__":
  sys.exit(main())
