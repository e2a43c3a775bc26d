"""A large collection through prepare_data, encoding and scoring: time, memory.

Copies the demo's documents until there are enough, each with its number, asks
the demo's queries, and runs every stage up to evaluate with trainings of two
steps. Prints one JSON document; the memory is that of the whole run.

  python tests/benchmarks/large_collection.py --documents=1000000
"""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import measuring

from synthq_jax import artifacts
from synthq_jax.data import environment_docs, files
from synthq_jax.pipeline import results

LIMIT_GIB = 6.0
FLAGS = (
  "--gin_file=recipes/demo_tiny.gin",
  "--gin.plan.Rows.synthetic=()",
  "--gin.plan.Rows.direct_dp=()",
  "--gin.plan.Rows.original=False",
)


def write(folder: pathlib.Path, documents: int) -> None:
  """Writes a BEIR folder, document by document."""
  data = environment_docs.build(environment_docs.EnvironmentDocs())
  copies = itertools.count()
  lines = (
    json.dumps(
      {"_id": f"{d.id}" if not copy else f"{d.id}-{copy}", "text": text}
    )
    for copy in copies
    for d in data.documents
    for text in [d.contents if not copy else f"{d.contents} Copy {copy}."]
  )
  files.write_lines(folder / "corpus.jsonl", itertools.islice(lines, documents))
  files.write_lines(
    folder / "queries.jsonl",
    (json.dumps({"_id": q.id, "text": q.text}) for q in data.queries),
  )
  for split in data.qrels:
    rows = (f"{query}\t{document}\t1" for query, document in data.pairs(split))
    header = "query-id\tcorpus-id\tscore"
    files.write_lines(folder / "qrels" / f"{split}.tsv", [header, *rows])


def measure(folder: pathlib.Path, workdir: pathlib.Path) -> dict:
  """Runs the stages in a process of their own; returns what they took."""
  command = [sys.executable, "-m", "synthq_jax.cli.main", "evaluate", "--quiet"]
  command += [f"--workdir={workdir}", f"--gin.SOURCE=beir:{folder}", *FLAGS]
  start = time.monotonic()
  made = subprocess.run(command, capture_output=True, text=True, check=False)
  if made.returncode:
    raise RuntimeError(made.stdout + made.stderr)
  peak = re.search(r"peak memory ([\d.]+) GiB", made.stdout)
  seconds = {
    path.parent.relative_to(workdir).as_posix(): round(
      json.loads(path.read_text())["result"]["seconds"], 1
    )
    for path in sorted(workdir.rglob(artifacts.RESULT_NAME))
  }
  prepared = artifacts.load(
    workdir / results.PRIVATE / "prepare_data", results.PreparedData
  )
  return {
    "documents": prepared.num_documents,
    "peak_gib": float(peak[1]),
    "seconds": round(time.monotonic() - start, 1),
    "stages_s": seconds,
  }


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--documents", type=int, default=1_000_000)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as place:
    root = pathlib.Path(place)
    write(root / "data", options.documents)
    found = measure(root / "data", root / "run")
  found["limit_gib"] = LIMIT_GIB
  passed = found["peak_gib"] <= LIMIT_GIB
  return measuring.finish("large_collection", found, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
