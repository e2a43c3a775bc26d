"""Tokenising, caching and Poisson batches of a large collection.

Makes passages as long as MS MARCO's (56 words on average) from the documents of
the demo set, tokenises and caches them in a fresh process, then draws Poisson
batches of 1,024 in another. Prints JSON with throughput, peak memory, size on
disk, time per batch (files in the page cache, and dropped from it where the
system allows it), and what 8.8 million passages would take.

  python tests/benchmarks/data.py --records=500000
"""

import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

import measuring
import numpy as np

LENGTH = 384
WORDS = 56
BATCH = 1024
PASSAGES = 8_841_823
LIMIT_MS = 50.0


def passages(records: int):
  """Yields ids and texts of random runs of words of the demo's documents."""
  from synthq_jax.data import environment_docs

  data = environment_docs.build()
  words = " ".join(d.contents for d in data.documents).split()
  rng = np.random.default_rng(0)
  starts = rng.integers(0, len(words) - 4 * WORDS, records)
  sizes = np.clip(rng.gamma(4.0, WORDS / 4, records), 5, 4 * WORDS).astype(int)
  for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
    yield f"p{number}", " ".join(words[start : start + size])


def make(place: pathlib.Path, records: int) -> dict:
  """Writes the passages as MS MARCO's table."""
  from synthq_jax.data import files

  files.write_lines(
    table_of(place), (f"{id_}\t{text}" for id_, text in passages(records))
  )
  return {"mib_of_text": round(table_of(place).stat().st_size / 2**20, 1)}


def table_of(place: pathlib.Path) -> pathlib.Path:
  return place.with_name("collection.tsv")


def write(place: pathlib.Path, threads: int) -> dict:
  """Caches passages, from the table to the finished cache."""
  from synthq_jax.data import files, shipped, token_cache
  from synthq_jax.data import vocabulary as vocabulary_lib

  vocabulary = vocabulary_lib.load(
    shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS
  )
  held = measuring.peak_mib()
  rows = (row for _, row in files.table(table_of(place), columns=2))
  start = time.monotonic()
  with token_cache.writing(
    place, LENGTH, vocab_size=vocabulary.vocab_size
  ) as writer:
    while chunk := list(itertools.islice(rows, 4096)):
      ids, texts = zip(*chunk, strict=True)
      tokens, _ = vocabulary_lib.tokenize_and_count(
        vocabulary, texts, length=LENGTH, threads=threads
      )
      writer.append(tokens, ids)
  cache = token_cache.load(place)
  seconds = time.monotonic() - start
  return {
    "seconds": round(seconds, 2),
    "records_per_second": round(len(cache) / seconds),
    "peak_mib": round(measuring.peak_mib()),
    "peak_mib_added": round(measuring.peak_mib() - held, 1),
    "gib_on_disk": round(size_of(place) / 2**30, 3),
  }


def read(place: pathlib.Path, steps: int) -> dict:
  """Draws Poisson batches; nothing of the cache is in this process yet."""
  from synthq_jax.data import token_cache
  from synthq_jax.privacy import sampling

  before = measuring.peak_mib()
  cache = token_cache.load(place)
  sampler = sampling.Poisson.with_margin(
    num_examples=len(cache), expected_batch_size=BATCH, multiple_of=8
  )
  cold, dropped = [], True
  for step in range(5):
    dropped &= drop_pages(place)
    cold.append(one_batch(cache, sampler, step))
  warm = [one_batch(cache, sampler, step) for step in range(5, 5 + steps)]
  return {
    "rows_of_a_batch": sampler.max_batch_size,
    "warm_ms_median": round(float(np.median(warm)), 2),
    "warm_ms_max": round(max(warm), 2),
    "cold_ms_median": round(float(np.median(cold)), 2) if dropped else None,
    "limit_ms": LIMIT_MS,
    "peak_mib_added": round(measuring.peak_mib() - before, 1),
  }


def one_batch(cache, sampler, step: int) -> float:
  """Milliseconds of drawing a batch and reading its tokens."""
  start = time.perf_counter()
  records = {"inputs": cache.tokens}
  sampler.take(records, sampler.batch(seed=7, step=step))
  return 1000 * (time.perf_counter() - start)


def drop_pages(place: pathlib.Path) -> bool:
  """Asks the system to forget the files; whether it could be asked."""
  if not hasattr(os, "posix_fadvise"):
    return False
  for path in place.iterdir():
    with open(path, "rb") as stream:
      os.fsync(stream.fileno())
      os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
  return True


def size_of(place: pathlib.Path) -> int:
  return sum(path.stat().st_size for path in place.iterdir())


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--records", type=int, default=500_000)
  parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument("--part", choices=("make", "write", "read"))
  parser.add_argument("--place", type=pathlib.Path)
  flags = parser.parse_args()
  if flags.part:
    parts = {
      "make": lambda: make(flags.place, flags.records),
      "write": lambda: write(flags.place, flags.threads),
      "read": lambda: read(flags.place, flags.steps),
    }
    print(json.dumps(parts[flags.part]()))
    return 0
  with tempfile.TemporaryDirectory() as root:
    common = [f"--place={root}/cache", f"--records={flags.records}"]
    common += [f"--threads={flags.threads}", f"--steps={flags.steps}"]
    made, written, batches = (
      measuring.fresh(__file__, f"--part={part}", *common)
      for part in ("make", "write", "read")
    )
  scale = PASSAGES / flags.records
  report = {
    "records": flags.records,
    "length": LENGTH,
    "threads": flags.threads,
    "passages": made,
    "write": written,
    "poisson_batch": batches,
    "projected_8.8_million": {
      "minutes": round(scale * written["seconds"] / 60, 1),
      "gib_on_disk": round(scale * written["gib_on_disk"], 2),
    },
  }
  passed = batches["warm_ms_max"] < LIMIT_MS
  return measuring.finish("data", report, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
