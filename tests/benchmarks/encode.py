"""Encoding on this machine: ours against sentence-transformers', in turns.

Processor seconds and passages a second of one public encoder over the first documents
of a collection, cut at one length; both give the same vectors. Prints one JSON document.

  bash launch/minilm.sh minilm
  python tests/benchmarks/encode.py --encoder=minilm --corpus=corpus.jsonl
"""

import functools
import gzip
import itertools
import json
import sys

import measuring
import numpy as np


def texts_of(path: str, number: int) -> list[str]:
  """Reads title and text of the first documents of a corpus.jsonl, maybe gzipped."""
  opened = gzip.open if path.endswith(".gz") else open
  with opened(path, "rt", encoding="utf-8") as stream:
    lines = map(json.loads, itertools.islice(stream, number))
    return [f"{one.get('title') or ''} {one['text']}".strip() for one in lines]


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--encoder", required=True)
  parser.add_argument("--corpus", required=True)
  parser.add_argument("--documents", type=int, default=10**9)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--repeats", type=int, default=2)
  options = parser.parse_args()

  import sentence_transformers

  from synthq_jax.data import sentence_tokens
  from synthq_jax.models import sentence_encoder
  from synthq_jax.retrieval import encode

  texts = texts_of(options.corpus, options.documents)
  tokens = sentence_tokens.load(options.encoder, length=options.length)
  params, shape = sentence_encoder.load(options.encoder)
  theirs = sentence_transformers.SentenceTransformer(
    options.encoder, device="cpu"
  )
  theirs.max_seq_length = options.length
  runs = {
    "synthq_jax": lambda some: encode.encode(params, shape, tokens.rows(some)),
    "sentence_transformers": lambda some: theirs.encode(
      some, show_progress_bar=False
    ),
  }
  vectors = {name: run(texts[:2048]) for name, run in runs.items()}  # compiles
  apart = vectors["synthq_jax"] - vectors["sentence_transformers"]
  apart = float(np.abs(apart).max())
  found = measuring.in_turns(
    {name: functools.partial(run, texts) for name, run in runs.items()},
    options.repeats,
  )
  return measuring.finish(
    "encode",
    {
      "documents": len(texts),
      "length": options.length,
      "largest_difference": apart,
      **found,
    },
    passed=found["processor_ratio"] <= 0.8 and apart <= 1e-5,
  )


if __name__ == "__main__":
  sys.exit(main())
