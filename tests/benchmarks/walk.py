"""Follows one private query through a run, call by call.

The run is demo_tiny on a small log. One train query holds a word that stands nowhere
else. A stop is a function of the package that is called with an argument that holds
this word, and its caller. A climb is a stop in a package that stands above its
caller's, by `RANKS` of the structure test.

  python tests/benchmarks/walk.py
"""

import collections
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
from typing import Any

WORD = "quetzalnebulizer"
MOST, DEPTH = 400, 3
"""Elements of a collection that are looked at, and collections in collections."""
WORDS = (
  "river bridge winter market station teacher garden engine letter island"
  " copper violin harbor meadow pepper candle mirror ladder basket thunder"
).split()
SPLITS = {"train": (0, 300), "dev": (300, 350), "test": (350, 400)}


def write_log(folder: pathlib.Path) -> None:
  """Writes 400 documents, each with a query of its words, in BEIR layout."""
  rng = random.Random(0)
  texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(400)]
  queries = [" ".join(rng.sample(text.split(), 3)) for text in texts]
  queries[7] += f" {WORD}"
  corpus = [
    {"_id": f"d{i}", "title": f"page {i}", "text": text}
    for i, text in enumerate(texts)
  ]
  asked = [{"_id": f"q{i}", "text": text} for i, text in enumerate(queries)]
  (folder / "qrels").mkdir(parents=True)
  for name, lines in (("corpus", corpus), ("queries", asked)):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text)
  for split, (first, end) in SPLITS.items():
    rows = [f"q{i}\td{i}\t1" for i in range(first, end)]
    lines = ["query-id\tcorpus-id\tscore", *rows]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")


def holds(value: Any, depth: int = DEPTH) -> bool:
  """Checks whether a value holds the word, in collections and dataclasses too."""
  if isinstance(value, str):
    return WORD in value
  if isinstance(value, bytes):
    return WORD.encode() in value
  if not depth:
    return False
  if isinstance(value, dict):
    value = list(value.values())
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    names = [field.name for field in dataclasses.fields(value)]
    value = [getattr(value, name, None) for name in names]
  elif not isinstance(value, (list, tuple)):
    return False
  return any(holds(item, depth - 1) for item in value[:MOST])


class Walk:
  """The stops of the word: (caller's module, module, function)."""

  def __init__(self, package: pathlib.Path):
    """Starts without a stop."""
    self._package = str(package)
    self.stops: collections.Counter[tuple[str, str, str]]
    self.stops = collections.Counter()

  def __call__(self, frame: Any, event: str, _: Any) -> None:
    """Counts a call whose arguments hold the word; see `sys.setprofile`."""
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(self._package):
      return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(holds(frame.f_locals.get(name)) for name in names):
      stop = (self._find_caller(frame), self._name(frame), code.co_name)
      self.stops[stop] += 1

  def _name(self, frame: Any) -> str:
    return frame.f_code.co_filename[len(self._package) + 1 :]

  def _find_caller(self, frame: Any) -> str:
    """Returns the module of the nearest caller in the package; "" for none."""
    while frame := frame.f_back:
      if frame.f_code.co_filename.startswith(self._package):
        return self._name(frame)
    return ""


def summarize(walk: Walk) -> dict[str, Any]:
  """Counts the stops, their modules and packages; lists the climbs."""
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
  import structure_test

  def rank(module: str) -> int:
    place = pathlib.PurePath(module).with_suffix("").parts[0]
    return structure_test.RANKS.get(place, -1)

  modules = {module for _, module, _ in walk.stops}
  return {
    "calls": walk.stops.total(),
    "stops": len(walk.stops),
    "functions": len({(module, name) for _, module, name in walk.stops}),
    "packages": sorted({module.split("/")[0] for module in modules}),
    "modules": sorted(modules),
    "climbs": sorted(
      stop for stop in walk.stops if stop[0] and rank(stop[1]) > rank(stop[0])
    ),
  }


def main() -> int:
  import synthq_jax
  from synthq_jax.cli import main as command

  walk = Walk(pathlib.Path(synthq_jax.__file__).parent)
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "log"
    write_log(log)
    sys.setprofile(walk)
    code = command.main(
      [
        "run",
        "--gin_file=gin_configs/recipes/demo_tiny.gin",
        "--gin_file=gin_configs/data/beir.gin",
        f"--gin.SOURCE=beir:{log}",
        "--gin.RELEASED_SCORES=False",
        f"--workdir={pathlib.Path(folder) / 'run'}",
      ]
    )
    sys.setprofile(None)
  print(json.dumps(summarize(walk), indent=1))
  return code


if __name__ == "__main__":
  sys.exit(main())
