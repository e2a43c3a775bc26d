"""Commands that are no stages: calculator, export, corpora, leaks."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from synthq_jax.cli import flags, screen
from synthq_jax.storage import stores

__all__ = ["TOOLS", "Tool", "find"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
  """A command without gin files."""

  words: str
  """Summary of the command."""
  group: str = ""
  """Summary of the group that its name begins with."""
  flags: Mapping[str, str | Mapping[str, Any]]
  """Help, or all arguments of `add_argument`, by flag."""
  run: Callable[[argparse.Namespace], str]
  """From the parsed flags to what is printed."""
  downloads: tuple[str, ...] = ()
  """Flags that may be URLs: what lies there is downloaded first."""
  local: Callable[[str], str] = stores.local
  """Downloads it: from a path or URL to a path."""


def find(options: argparse.Namespace, known: Mapping[str, Tool]) -> Tool | None:
  """Returns the tool that was asked for, or None for a stage.

  Args:
    options: the parsed flags.
    known: tools by the words of their commands.
  """
  names = (options.stage, getattr(options, "tool", ""))
  return known.get(" ".join(filter(None, names)))


def _privacy(options: argparse.Namespace) -> str:
  from synthq_jax.privacy import calculator, ledger

  given = {
    k: v for k, v in vars(options).items() if k not in ("stage", "debug")
  }
  path = given.pop("ledger")
  if path is None:
    missing = [k for k in ("num_examples", "batch_size") if given[k] is None]
    if missing:
      names = " and ".join(f"--{k.removeprefix('num_')}" for k in missing)
      raise flags.UsageError(f"expected {names}, or --ledger=FILE, got none")
    text = calculator.describe(**given)
    return f"{text}\n\n{screen.explain_epsilon(options.epsilon, options.unit)}"
  delta = given.pop("delta")
  others = [k for k, value in given.items() if value is not None]
  if others:
    raise flags.UsageError(
      f"--ledger goes with --delta alone, got --{others[0]}"
    )
  return f"{ledger.describe(path, delta=delta)}\n\n{screen.explain_epsilon()}"


def _export(options: argparse.Namespace) -> str:
  from synthq_jax.tools import export

  given = [options.checkpoint, options.queries, options.ranking]
  if sum(map(bool, given)) != 1:
    raise flags.UsageError(
      "expected one of --checkpoint=FOLDER, --queries=FOLDER and"
      f" --ranking=FOLDER, got {sum(map(bool, given)) or 'none'}"
    )
  return export.run(
    next(filter(None, given)),
    options.to,
    format=options.format,
    step=options.step,
    allow_private=options.allow_private,
  )


def _with_its_run(place: str) -> str:
  from synthq_jax.tools import export

  return export.local(place)


def _search(options: argparse.Namespace) -> str:
  """Answers a query with a system of a run, or serves a page that does."""
  from synthq_jax.tools import search, search_page

  if options.serve == (options.query is not None):
    raise flags.UsageError(
      'expected a query in quotes ("..."), or --serve, got'
      f" {'both' if options.serve else 'none'}"
    )
  if options.k < 1 or not 0 <= options.port < 1 << 16:
    raise flags.UsageError(
      "expected --k of at least 1 and --port below 65536, got"
      f" --k={options.k} --port={options.port}"
    )
  if any("\ud800" <= letter <= "\udfff" for letter in options.query or ""):
    raise flags.UsageError("expected a query in UTF-8, got other bytes")
  searcher = search.open_run(
    options.workdir, options.system, private=options.private
  )
  if not options.serve:
    hits = searcher.search(options.query, options.k)
    return search.describe(searcher.row, hits)
  page = search_page.make_server(
    searcher, port=options.port, k=options.k, private=options.private
  )
  address = f"http://{search_page.HOST}:{page.server_port}"
  print(f"{address} answers until Ctrl-C", flush=True)
  with page:
    page.serve_forever()
  return ""


def _means(options: argparse.Namespace) -> str:
  from synthq_jax.report import means

  return means.run(options.workdirs, private=options.private)


def _corpus_overlap(options: argparse.Namespace) -> str:
  from synthq_jax.audit import corpus_overlap as overlap_lib
  from synthq_jax.tools import corpus_overlap

  return corpus_overlap.run(
    options.workdir,
    options.corpus,
    config=overlap_lib.Config(
      sample_size=options.sample_size,
      runs=options.runs,
      ngram=options.ngram,
      seed=options.seed,
    ),
    progress=not options.quiet,
  )


def _leakage_check(options: argparse.Namespace) -> str:
  from synthq_jax.data import ids
  from synthq_jax.tools import leakage_check

  names = [f.name for f in dataclasses.fields(leakage_check.Request)]
  request = leakage_check.Request(**{n: getattr(options, n) for n in names})
  if options.labels and options.threshold is not None:
    raise flags.UsageError("expected --labels or --threshold, got both")
  if options.precision is not None and not options.labels:
    raise flags.UsageError(
      "--precision goes with --labels, on which thresholds are calibrated, got"
      " it alone: leave it out"
    )
  asked = dict.fromkeys(options.detector or _DETECTORS)
  encoder = {
    n: getattr(options, n) for n in ("checkpoint", "vocabulary", "bert")
  }
  detectors = []
  for name in asked:
    # A flag that goes with none of the detectors is refused by each.
    is_meant = name != "exact" or len(asked) == 1
    has_encoder = name == "embedding" or "embedding" not in asked
    detector = leakage_check.detector(
      name,
      threshold=options.threshold if is_meant else None,
      **(encoder if has_encoder else {}),
    )
    if options.labels:
      detector = leakage_check.calibrate(
        detector,
        options.labels,
        precision=_PRECISION
        if options.precision is None
        else options.precision,
      )
    detectors.append(detector)
  with ids.noting() as tally:
    check, said = leakage_check.run(
      request, detectors, progress=not options.quiet
    )
  for note in ids.describe(tally):
    print(
      f"synthq: note: {options.train}, {options.test}: {note}", file=sys.stderr
    )
  if not check.is_passed:
    screen.show(said)
    raise screen.RefutedError(
      f"{check.num_leaked:,} queries of the log leak, more than"
      f" --fail_above={check.fail_above}: train on the ids of"
      f" {options.output}/clean_ids.txt"
    )
  return said


_DETECTORS = ("exact", "token_set", "trigrams")
_PRECISION = 0.9
_QUIET = {"action": "store_true", "help": "no progress bars"}


def _required(words: str, **named: Any) -> dict[str, Any]:
  return {"required": True, "help": words, **named}


def _number(words: str = "", kind: type = int, **named: Any) -> dict[str, Any]:
  return {"type": kind, "help": words, **named}


TOOLS = {
  "privacy": Tool(
    words="computes noise from epsilon, or epsilon from noise; adds up a ledger",
    run=_privacy,
    downloads=("ledger",),
    flags={
      "--epsilon": _number("the target, or", float),
      "--noise_multiplier": _number("noise over sensitivity", float),
      "--epochs": _number("passes over the records, or", float),
      "--steps": _number(),
      "--examples": _number(dest="num_examples"),
      "--batch_size": _number("expected"),
      "--delta": _number("1 / (2 examples) where it is not given", float),
      "--unit": "query, or user: all queries of one together",
      "--queries_per_user": _number("with --unit=user: the most that are read"),
      "--ledger": "instead: add up a private/ledger.jsonl",
    },
  ),
  "export": Tool(
    words="writes a model, queries or weights in a format that others read",
    run=_export,
    downloads=("checkpoint", "queries", "ranking"),
    local=_with_its_run,
    flags={
      "--checkpoint": "a folder of any known format, or",
      "--queries": "a folder of synthetic queries, e.g."
      " runs/demo/filter_queries/eps8, or",
      "--ranking": "a folder of weights, e.g. runs/demo/learn_to_rank/public_only",
      "--to": _required("the new folder"),
      "--format": _required(
        "of a model: t5x, huggingface, safetensors or sentence-transformers;"
        " of queries: beir or hf (parquet); of weights: ranker"
      ),
      "--step": _number("of a T5X checkpoint; default: the source's own, or 0"),
      "--allow_private": {
        "action": "store_true",
        "help": "also what was trained without differential privacy",
      },
    },
  ),
  "search": Tool(
    words="answers a query with a finished run, in the terminal or a browser",
    run=_search,
    downloads=("workdir",),
    flags={
      "query": {"nargs": "?", "help": "in quotes"},
      "--workdir": _required("of the run"),
      "--system": "bm25 or another row of the run; by default what is made of the"
      " first synthetic row, else bm25",
      "--k": _number("documents", default=10),
      "--private": {
        "action": "store_true",
        "help": "also retrievers that must not be shared",
      },
      "--serve": {
        "action": "store_true",
        "help": "a page for the browser of this machine, at 127.0.0.1",
      },
      "--port": _number("of that page; 0 takes a free one", default=8000),
    },
  ),
  "means": Tool(
    words="averages the scores of runs with several seeds",
    run=_means,
    flags={
      "workdirs": {"nargs": "+", "metavar": "WORKDIR", "help": "of each run"},
      "--private": {
        "action": "store_true",
        "help": "also scores on private queries, which must not be shared",
      },
    },
  ),
  "corpus_overlap": Tool(
    words="measures how many queries and documents a public corpus holds: private",
    run=_corpus_overlap,
    flags={
      "--corpus": _required(
        "a glob of text or JSONL files, in quotes, or tfds:NAME[@SPLIT]"
      ),
      "--workdir": _required("of a run whose data is prepared"),
      "--sample_size": _number("items of each run", default=10_000),
      "--runs": _number("random samples", default=5),
      "--ngram": _number("words of an n-gram", default=8),
      "--seed": _number("of the samples", default=0),
      "--quiet": _QUIET,
    },
  ),
  "leakage check": Tool(
    words="finds test queries in a training log; exits with 3 for CI",
    group="finds leaks between a query log and other texts: private",
    run=_leakage_check,
    flags={
      "--train": _required(
        "the log, streamed: a source such as beir:DIR, msmarco:DIR or"
        " ir_datasets:ID; or a file: id, tab, query, or JSONL with _id and text"
      ),
      "--test": _required("test queries: the same, or TREC topics as JSONL"),
      "--train_split": "of a source: only queries that are judged there",
      "--test_split": "the same, of the test queries",
      "--variants": "more texts of test queries: id, tab, query; or JSONL with"
      " topic and variant",
      "--known": {
        "metavar": "KNOWN",
        "dest": "known_pairs",
        "help": "pairs that people judged, each a leak: a line of test id, tab, id"
        " in the log; or labelled pairs (JSONL)",
      },
      "--detector": {
        "action": "append",
        "help": "exact, token_set, containment, trigrams or embedding; several"
        f" times; by default {', '.join(_DETECTORS)}",
      },
      "--threshold": _number(
        "least similarity, of all but exact; by default each detector's own,"
        " calibrated on labelled pairs for precision .9",
        float,
      ),
      "--labels": "instead: labelled pairs (JSONL) to calibrate thresholds on",
      "--precision": _number(
        f"wanted on --labels, by default {_PRECISION}", float
      ),
      "--fail_above": _number("exit with 3 if more queries of the log leak"),
      "--output": _required(
        "a folder: check.json, report.html, pairs.jsonl, clean_ids.txt; its"
        " owner alone may read them"
      ),
      "--processes": _number("side by side; by default one for each core"),
      "--checkpoint": "of the encoder of embedding: a folder of any known format",
      "--vocabulary": "the SentencePiece model of --checkpoint",
      "--bert": {
        "metavar": "FOLDER",
        "help": "instead: a BERT of Hugging Face or sentence-transformers",
      },
      "--quiet": _QUIET,
    },
  ),
}
"""Tools by the words of their commands."""
