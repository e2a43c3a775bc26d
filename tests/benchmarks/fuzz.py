"""Random and damaged input for every parser: is the answer always one line?

Each parser reads files that hypothesis draws: bytes, a sound file that was cut,
spliced or changed in places, and hostile structures. It must read the file, or
raise a ValueError of this package whose message is one line; within 10 seconds,
without more than 1 GiB of memory, and without ending the process. A forked process
reads the files of a parser, so that a crash has a file.

  PYTHONPATH=. python tests/benchmarks/fuzz.py --inputs=200000

prints, by parser, how many files were read, refused and wrong, and the first
wrong one of each kind; exit code 1 if there is any. What pickles would run is
tried in tests/fuzz_test.py.
"""

import argparse
import collections
import dataclasses
import gzip
import io
import json
import os
import pathlib
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

import synthq_jax

SECONDS = 10
MEMORY = 1 << 30
_PACKAGE = str(pathlib.Path(synthq_jax.__file__).parent) + os.sep
"""A whole path: a clone, with the environment in it, may have the same name."""
_HOSTILE = (
  b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 3000, b"{\"a\":" * 3000,
  b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b"null", b"\\ud800", b"\r", b"\n",
  b"\t", b'"', b"../../etc/passwd", b"\x1f\x8b", b"\xc0\x80", b"\x7f" * 9,
  b"\xff" * 8, b"\x80" * 8, b"%", b"@", b"'", b"\xe2\x80\xa8", b"-1", b"1" * 400,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Parser:
  """A parser: what it reads, and sound files to begin with."""

  read: Callable[[pathlib.Path], Any]
  name: str
  """Of the file, below a folder of its own."""
  seeds: Sequence[bytes]
  prepare: Callable[[pathlib.Path], Any] = lambda folder: None
  """Makes what lies beside the file."""


def _json_values() -> st.SearchStrategy[bytes]:
  """Lines of JSON objects with the keys that sources ask for."""
  keys = st.sampled_from(
    ["_id", "text", "title", "query", "document", "split", "client", "x"]
  )
  leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)
  )
  value = st.recursive(
    leaf,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3),
    max_leaves=6,
  )
  line = st.dictionaries(keys, value, max_size=4).map(json.dumps)
  return st.lists(line, max_size=4).map(lambda x: "\n".join(x).encode())


def _changed(seed: bytes) -> st.SearchStrategy[bytes]:
  """A sound file with a few places cut out, overwritten or put in."""
  place = st.integers(0, len(seed))
  change = st.tuples(
    place,
    st.integers(0, 12),
    st.one_of(st.binary(max_size=9), st.sampled_from(_HOSTILE)),
  )

  def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
    data = seed
    for at, removed, put in changes:
      data = data[:at] + put + data[at + removed :]
    return data

  return st.one_of(
    st.lists(change, min_size=1, max_size=4).map(apply),
    place.map(lambda at: seed[:at]),
  )


def inputs_of(parser: Parser) -> st.SearchStrategy[bytes]:
  """Bytes of every kind for a parser."""
  kinds = [*map(_changed, parser.seeds)] * 3
  kinds += [st.binary(max_size=200), st.sampled_from(_HOSTILE)]
  if parser.name.endswith((".jsonl", ".csv", ".tsv")):
    kinds += [_json_values(), st.text(max_size=200).map(str.encode)]
  kinds += [_changed(seed).map(gzip.compress) for seed in parser.seeds[:1]]
  return st.one_of(kinds).filter(lambda data: len(data) <= 1 << 20)


# The parsers. Each imports what it reads with: children are forked after that.


def _table(rows: Sequence[Sequence[Any]], between: str) -> bytes:
  return "".join(f"{between.join(map(str, row))}\n" for row in rows).encode()


def _safetensors() -> bytes:
  from synthq_jax.models.checkpoints import tensors

  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "x")
    tree = {"a": {"b": np.ones((2, 3), np.float32)}, "c": np.zeros(2, np.int32)}
    tensors.write_safetensors(path, tensors.of_tree(tree), {"k": "v"})
    return path.read_bytes()


_CHECKPOINT = "checkpoint_3"


def _t5x(folder: pathlib.Path) -> None:
  from synthq_jax.models.checkpoints import t5x, tensors

  made = folder / _CHECKPOINT
  if made.exists():
    return
  made.mkdir(parents=True)
  tree = {"a": {"b": np.ones((2, 3), np.float32)}, "c": np.ones((64, 64))}
  tree["c"] = tree["c"].astype(np.float32)
  t5x.write(made, tensors.of_tree(tree), 3)


def _t5x_seeds() -> tuple[bytes, bytes, bytes]:
  with tempfile.TemporaryDirectory() as place:
    _t5x(pathlib.Path(place))
    made = pathlib.Path(place, _CHECKPOINT)
    names = ("checkpoint", "target.c/.zarray", "target.c/0.0")
    return tuple((made / name).read_bytes() for name in names)


def _apart(make: Callable[[], Any]) -> Any:
  """Returns what a forked process makes: this one starts no threads."""
  with tempfile.NamedTemporaryFile() as file:
    pid = os.fork()
    if not pid:
      try:
        pathlib.Path(file.name).write_bytes(pickle.dumps(make()))
      except BaseException:
        traceback.print_exc()
      finally:
        os._exit(0)
    os.waitpid(pid, 0)
    return pickle.loads(pathlib.Path(file.name).read_bytes())


def _parquet() -> bytes:
  import pyarrow
  from pyarrow import parquet

  stream = io.BytesIO()
  columns = {"query": ["a", "b", None], "document": ["c", "d", "e"]}
  parquet.write_table(pyarrow.table(columns | {"n": [1, 2, 3]}), stream)
  return stream.getvalue()


def _npz() -> bytes:
  stream = io.BytesIO()
  np.savez(stream, tokens=np.ones((3, 2), np.int32), ids=np.array(["a", "b"]))
  return stream.getvalue()


def _npy() -> bytes:
  stream = io.BytesIO()
  np.save(stream, np.ones((3, 2), np.float32))
  return stream.getvalue()


def _everything(tensors: dict[str, Any]) -> None:
  """Reads tensors as a model does that found their shapes to be right."""
  small = {
    name: one
    for name, one in tensors.items()
    if 0 <= np.prod(one.shape, dtype=float) < 1e7
  }
  from synthq_jax.models.checkpoints import tensors as lib

  lib.fetch(small)


def parsers() -> dict[str, Parser]:
  """By name; what they import is imported."""
  from synthq_jax.cli import main
  from synthq_jax.data import (
    beir,
    jsonl,
    newsqa,
    shipped,
    table_files,
    token_cache,
    vocabulary,
  )
  from synthq_jax.models import bert, t5_checkpoints
  from synthq_jax.models.checkpoints import t5x, tensors
  from synthq_jax.privacy import ledger
  from synthq_jax.privacy import statement as statement_lib
  from synthq_jax.retrieval import trec
  from synthq_jax.runtime import prepared_files, results, workspace
  from synthq_jax.stages import plan
  from synthq_jax.storage import array_files, artifacts

  pairs = [{"query": f"q {i}", "document": f"text {i}"} for i in range(30)]
  lines = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
  table = _table([("query", "document"), ("q 1", "d 1"), ("q 2", "d 2")], "\t")
  run = _table(
    [("q1", "Q0", f"d{i}", i, 9.5 - i, "tag") for i in range(4)], " "
  )
  qrels = _table(
    [("query-id", "corpus-id", "score"), ("q1", "d1", 1), ("q2", "d1", 2)], "\t"
  )
  gin = (
    b"from __gin__ import dynamic_registration\n"
    b"from synthq_jax.stages import plan\n"
    b"from synthq_jax.stages import generate\n"
    b"EPSILON = 8.0  # a macro\nplan.Rows.synthetic = (%EPSILON, 3)\n"
    b"plan.Rows.direct_dp = (1.0, 2.0)\ngenerate.Config.p = 0.9\n"
    b"generate.Config.prefix = 'a \\'b\\''\n"
  )
  none = statement_lib.non_private()
  shape = (shipped.DIRECTORY / "config.json").read_bytes()
  result = {
    "fingerprint": "f",
    "result": {"_type": "Account", "seconds": 1.0},
    "listed": ["."],
  }

  def gin_text(path: pathlib.Path) -> None:
    main.configure(plan.RunConfig, [os.fspath(path)])

  def native(path: pathlib.Path) -> None:
    _everything(t5x.read(path.parent)[1])

  def zarr(path: pathlib.Path) -> None:
    _everything(t5x.read(path.parents[1])[1])

  def bert_shape(path: pathlib.Path) -> None:
    bert.load(path.parent)

  def cache(path: pathlib.Path) -> None:
    token_cache.load(path.parent)

  def shape_of(path: pathlib.Path) -> None:
    t5_checkpoints.load_config(path.parent)

  def arrays(path: pathlib.Path) -> None:
    made = results.PublicDocuments.__new__(results.PublicDocuments)
    object.__setattr__(made, "directory", "prepare_data")
    prepared_files.arrays(workspace.Folders(path.parent), made, path)

  def result_of(path: pathlib.Path) -> None:
    artifacts.read_fingerprint(path.parent)
    artifacts.check(path.parent)

  corpus = "".join(
    json.dumps({"_id": f"d{i}", "text": f"text {i}"}) + "\n" for i in range(3)
  )
  berts = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
    **dict.fromkeys(("max_position_embeddings", "type_vocab_size"), 8),
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
  }
  modules = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
  ]
  stories = {
    "data": [
      {
        "storyId": "./cnn/stories/a.story",
        "text": "An otter sleeps.",
        "type": "train",
        "questions": [
          {"q": "Who?", "isQuestionBad": 0, "consensus": {"s": 3, "e": 8}}
        ],
      }
    ]
  }
  native_seed, zarray, chunk = _apart(_t5x_seeds)
  return {
    "jsonl": Parser(jsonl.read_jsonl, "input.jsonl", [lines, lines[:200]]),
    "csv": Parser(
      lambda path: collections.deque(table_files.rows(path), 0),
      "input.csv",
      [table.replace(b"\t", b","), b'a,b\n"x\ny",2\n'],
    ),
    "tsv": Parser(jsonl.read_jsonl, "input.tsv", [table]),
    "qrels": Parser(beir.read_judgements, "input.tsv", [qrels]),
    "trec run": Parser(trec.read_run, "input.txt", [run]),
    "gin": Parser(gin_text, "input.gin", [gin]),
    "safetensors": Parser(
      lambda path: _everything(tensors.read_safetensors(path)),
      "input.safetensors",
      [_apart(_safetensors)],
    ),
    "t5 shape": Parser(shape_of, "config.json", [shape]),
    "hf shape": Parser(
      shape_of, "config.json", [hugging_face_shape().encode()]
    ),
    "bert shape": Parser(
      bert_shape, "config.json", [json.dumps(berts, indent=1).encode()]
    ),
    "bert modules": Parser(
      bert_shape, "modules.json", [json.dumps(modules, indent=1).encode()]
    ),
    "beir": Parser(
      lambda path: beir.read_beir(path.parent),
      "corpus.jsonl",
      [corpus.encode()],
      _beir,
    ),
    "newsqa": Parser(newsqa.read, "input.json", [json.dumps(stories).encode()]),
    "token cache": Parser(
      cache,
      "manifest.json",
      [_apart(lambda: _cache_file("manifest.json"))],
      _cache,
    ),
    "token cache names": Parser(
      cache,
      "ids.txt",
      [_apart(lambda: _cache_file("ids.txt"))],
      _cache,
    ),
    "t5x msgpack": Parser(
      native, f"{_CHECKPOINT}/{t5x.FILE}", [native_seed], _t5x
    ),
    "t5x zarr metadata": Parser(
      zarr, f"{_CHECKPOINT}/target.c/.zarray", [zarray], _t5x
    ),
    "t5x zarr chunk": Parser(
      zarr, f"{_CHECKPOINT}/target.c/0.0", [chunk[:400], chunk], _t5x
    ),
    "sentencepiece": Parser(
      vocabulary.load, "input.model", [_apart(_small_vocabulary)]
    ),
    "parquet": Parser(
      lambda path: collections.deque(table_files.rows(path), 0),
      "input.parquet",
      [_apart(_parquet)],
    ),
    "npz": Parser(arrays, "input.npz", [_npz()]),
    "npy": Parser(array_files.read, "input.npy", [_npy()]),
    "result": Parser(
      result_of,
      artifacts.RESULT_NAME,
      [json.dumps(artifacts.sealed(result), indent=1).encode()],
    ),
    "ledger": Parser(
      ledger.read,
      "input.jsonl",
      [(ledger.line("a/1", none) + ledger.line("a/2", none)).encode()],
    ),
  }


def hugging_face_shape() -> str:
  """A config.json of a small T5."""
  fields = {
    **dict.fromkeys(("d_model", "d_kv", "d_ff", "num_heads"), 8),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 1),
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 32,
    "model_type": "t5",
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
  }
  return json.dumps(fields, indent=1)


def _beir(folder: pathlib.Path) -> None:
  (folder / "qrels").mkdir(exist_ok=True)
  (folder / "queries.jsonl").write_text('{"_id": "q", "text": "otter"}\n')
  rows = [("query-id", "corpus-id", "score"), ("q", "d1", 1)]
  (folder / "qrels" / "test.tsv").write_bytes(_table(rows, "\t"))


def _cache(folder: pathlib.Path) -> None:
  from synthq_jax.data import token_cache

  with token_cache.writing(folder / "cache", 3, vocab_size=9) as writer:
    writer.append(np.ones((2, 3), np.int32), ["a", "b"])
  for path in (folder / "cache").iterdir():
    path.rename(folder / path.name)


def _cache_file(name: str) -> bytes:
  with tempfile.TemporaryDirectory() as place:
    _cache(pathlib.Path(place))
    return pathlib.Path(place, name).read_bytes()


def _small_vocabulary() -> bytes:
  from synthq_jax.data import vocabulary

  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "x.model")
    texts = [f"the otter {i} sleeps under a bridge" for i in range(50)]
    vocabulary.train(texts, path, vocab_size=30)
    return path.read_bytes()


# One input, and many.


class Hang(BaseException):
  """A parser took too long."""


def outcome(parser: Parser, path: pathlib.Path) -> str:
  """Reads a file; returns "read", "refused" or what is wrong with that."""
  try:
    parser.read(path)
    return "read"
  except Hang:
    return f"hangs for {SECONDS} s"
  except BaseException as error:
    frames = traceback.extract_tb(error.__traceback__)
    kind = type(error)
    is_ours = frames[-1].filename.startswith(_PACKAGE) and (
      kind is ValueError or kind.__module__.startswith("synthq_jax.")
    )
    text = str(error)
    if is_ours and text.strip() and len(text.splitlines()) == 1:
      return "refused"
    where = [f for f in frames if f.filename.startswith(_PACKAGE)][
      -1:
    ] or frames[-1:]
    at = f"{pathlib.Path(where[0].filename).name}:{where[0].lineno}"
    return f"{kind.__name__} from {at}: {text[:120]!r}"


def _alarm(number: int, frame: Any) -> None:
  raise Hang


def _in_child(
  parser: Parser,
  folder: pathlib.Path,
  seed: int,
  count: int,
  notes: pathlib.Path,
) -> None:
  """Reads files until all are done; notes outcomes."""
  parser.prepare(folder)
  path = folder / parser.name
  path.parent.mkdir(parents=True, exist_ok=True)
  signal.signal(signal.SIGALRM, _alarm)
  with open("/proc/self/statm") as stream:
    used = int(stream.read().split()[0]) * resource.getpagesize()
  limit = used + MEMORY
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  silent = os.open(os.devnull, os.O_WRONLY)
  os.dup2(silent, 1)
  os.dup2(silent, 2)
  counts: collections.Counter[str] = collections.Counter()
  wrong: dict[str, bytes] = {}

  @hypothesis.seed(seed)
  @hypothesis.settings(
    max_examples=count,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(inputs_of(parser))
  def read(data: bytes) -> None:
    path.write_bytes(data)
    signal.alarm(SECONDS)
    try:
      said = outcome(parser, path)
    finally:
      signal.alarm(0)
    counts[said if said in ("read", "refused") else "wrong"] += 1
    if said not in ("read", "refused"):
      wrong.setdefault(said, data)

  read()
  notes.write_bytes(pickle.dumps((counts, wrong)))


def fuzz(
  parser: Parser, number: int, *, seed: int = 0
) -> tuple[collections.Counter, dict[str, bytes]]:
  """Has a parser read files in a process; returns counts and what was wrong."""
  with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
    folder, notes = pathlib.Path(place, "input"), pathlib.Path(place, "notes")
    folder.mkdir()
    pid = os.fork()
    if not pid:
      code = 1
      try:
        _in_child(parser, folder, seed, number, notes)
        code = 0
      finally:
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    if notes.exists():
      return pickle.loads(notes.read_bytes())
    code = os.waitstatus_to_exitcode(status)
    path = folder / parser.name
    last = path.read_bytes() if path.exists() else b""
    said = f"process ended with {code}"
    return collections.Counter(wrong=1), {said: last}


def main(argv: Sequence[str] | None = None) -> int:
  options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  options.add_argument("--inputs", type=int, default=2000, help="in all")
  options.add_argument("--seed", type=int, default=0)
  options.add_argument("--only", default="", help="one parser")
  given = options.parse_args(argv)
  known = parsers()
  chosen = [given.only] if given.only else list(known)
  total: collections.Counter[str] = collections.Counter()
  for name in chosen:
    count = -(-given.inputs // len(chosen))
    counts, wrong = fuzz(known[name], count, seed=given.seed)
    total.update(counts)
    print(row(name, counts), *(f"  {said}: {x!r}" for said, x in wrong.items()))
  print(row("all", total))
  return int(total["wrong"] > 0)


def row(name: str, counts: collections.Counter[str]) -> str:
  """Counts of files that were read, refused and wrong."""
  cells = (counts[kind] for kind in ("read", "refused", "wrong"))
  return f"{name:20}" + "".join(f"{cell:9,}" for cell in cells)


if __name__ == "__main__":
  sys.exit(main())
