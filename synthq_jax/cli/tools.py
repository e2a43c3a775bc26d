"""Defines the commands that are no stages, such as `synthq export`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from synthq_jax.cli import flags, screen
from synthq_jax.storage import stores

__all__ = ["TOOLS", "Tool"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
  """A command without gin files."""

  words: str
  """Summary of the command."""
  flags: Mapping[str, str | Mapping[str, Any]]
  """Help text, or all arguments of `add_argument`, by flag."""
  run: Callable[[argparse.Namespace], str]
  """Runs the command on parsed flags; returns the text to print."""
  downloads: tuple[str, ...] = ()
  """Flags that may be URLs, whose files are downloaded first."""
  local: Callable[[str], str] = stores.local
  """Downloads a URL; returns the path of the copy, and paths unchanged."""


def _run_privacy(options: argparse.Namespace) -> str:
  from synthq_jax.privacy import calculator, ledger

  arguments = {
    k: v for k, v in vars(options).items() if k not in ("stage", "debug")
  }
  path = arguments.pop("ledger")
  if path is None:
    missing = [
      k for k in ("num_examples", "batch_size") if arguments[k] is None
    ]
    if missing:
      names = " and ".join(f"--{k.removeprefix('num_')}" for k in missing)
      raise flags.UsageError(f"expected {names}, or --ledger=FILE, got none")
    text = calculator.describe(**arguments)
    return f"{text}\n\n{screen.explain_epsilon(options.epsilon, options.unit)}"
  delta = arguments.pop("delta")
  others = [k for k, value in arguments.items() if value is not None]
  if others:
    raise flags.UsageError(
      f"--ledger goes with --delta alone, got --{others[0]}"
    )
  return f"{ledger.describe(path, delta=delta)}\n\n{screen.explain_epsilon()}"


def _run_export(options: argparse.Namespace) -> str:
  from synthq_jax.tools import export

  folders = [options.checkpoint, options.queries, options.ranking]
  if sum(map(bool, folders)) != 1:
    raise flags.UsageError(
      "expected one of --checkpoint=FOLDER, --queries=FOLDER and"
      f" --ranking=FOLDER, got {sum(map(bool, folders)) or 'none'}"
    )
  return export.run(
    next(filter(None, folders)),
    options.to,
    format=options.format,
    step=options.step,
    allow_private=options.allow_private,
  )


def _download_with_run(location: str) -> str:
  from synthq_jax.tools import export

  return export.local(location)


def _run_search(options: argparse.Namespace) -> str:
  """Searches with a system of a run, or serves its search page."""
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


def _run_means(options: argparse.Namespace) -> str:
  from synthq_jax.report import means

  return means.run(options.workdirs, private=options.private)


def _run_corpus_overlap(options: argparse.Namespace) -> str:
  from synthq_jax.tools import corpus_overlap

  return corpus_overlap.run(options.workdir, options.corpus)


def _run_leakage_check(options: argparse.Namespace) -> str:
  from synthq_jax.data import ids
  from synthq_jax.tools import leakage_check

  names = [f.name for f in dataclasses.fields(leakage_check.Request)]
  request = leakage_check.Request(**{n: getattr(options, n) for n in names})
  if options.labels and options.threshold is not None:
    raise flags.UsageError("expected --labels or --threshold, got both")
  detector_names = dict.fromkeys(options.detector or _DETECTORS)
  detectors = []
  for name in detector_names:
    # "exact" takes no threshold: alone, it refuses one.
    is_meant = name != "exact" or len(detector_names) == 1
    detector = leakage_check.detector(
      name, threshold=options.threshold if is_meant else None
    )
    if options.labels:
      detector = leakage_check.calibrate(
        detector, options.labels, precision=_PRECISION
      )
    detectors.append(detector)
  with ids.noting() as tally:
    check, summary = leakage_check.run(request, detectors)
  for note in ids.describe(tally):
    print(
      f"synthq: note: {options.train}, {options.test}: {note}", file=sys.stderr
    )
  if not check.is_passed:
    screen.show(summary)
    raise screen.RefutedError(
      f"{check.num_leaked:,} queries of the log leak, more than"
      f" --fail_above={check.fail_above}: train on the ids of"
      f" {options.output}/clean_ids.txt"
    )
  return summary


_DETECTORS = ("exact", "token_set", "trigrams")
_PRECISION = 0.9
_QUIET = {"action": "store_true", "help": "no progress bars"}


def _make_required(words: str, **named: Any) -> dict[str, Any]:
  return {"required": True, "help": words, **named}


def _make_number(
  words: str = "", kind: type = int, **named: Any
) -> dict[str, Any]:
  return {"type": kind, "help": words, **named}


TOOLS = {
  "privacy": Tool(
    words="computes noise from epsilon, or epsilon from noise; adds up a ledger",
    run=_run_privacy,
    downloads=("ledger",),
    flags={
      "--epsilon": _make_number("target epsilon, or --noise_multiplier", float),
      "--noise_multiplier": _make_number(
        "standard deviation of the noise over the sensitivity", float
      ),
      "--epochs": _make_number("passes over the records, or --steps", float),
      "--steps": _make_number("optimizer steps"),
      "--examples": _make_number("private records", dest="num_examples"),
      "--batch_size": _make_number("expected records of a batch"),
      "--delta": _make_number("default: 1 / (2 examples)", float),
      "--unit": "query, or user for all queries of one user together",
      "--queries_per_user": _make_number(
        "with --unit=user: most queries that are read of one user"
      ),
      "--ledger": "in place of these flags: a private/ledger.jsonl to add up",
    },
  ),
  "export": Tool(
    words="writes a model, queries or weights in a format that others read",
    run=_run_export,
    downloads=("checkpoint", "queries", "ranking"),
    local=_download_with_run,
    flags={
      "--checkpoint": "a folder of any known format, or",
      "--queries": "a folder of synthetic queries, e.g."
      " runs/demo/filter_queries/eps8, or",
      "--ranking": "a folder of weights, e.g. runs/demo/learn_to_rank/public_only",
      "--to": _make_required("the new folder"),
      "--format": _make_required(
        "of a model: t5x, huggingface, safetensors or sentence-transformers;"
        " of an adapter: map or sentence-transformers; of queries: beir or hf"
        " (parquet); of weights: ranker"
      ),
      "--step": _make_number(
        "step of a T5X checkpoint; default: the source's own, or 0"
      ),
      "--allow_private": {
        "action": "store_true",
        "help": "export results without differential privacy, too",
      },
    },
  ),
  "search": Tool(
    words="answers a query with a finished run, in the terminal or a browser",
    run=_run_search,
    downloads=("workdir",),
    flags={
      "query": {"nargs": "?", "help": "the query, in quotes"},
      "--workdir": _make_required("working directory of the run"),
      "--system": "bm25 or another row of the run; default: the last system with the"
      " retriever of the synthetic queries with the most epsilon, else bm25",
      "--k": _make_number("largest number of documents", default=10),
      "--private": {
        "action": "store_true",
        "help": "open retrievers that must not be shared, too",
      },
      "--serve": {
        "action": "store_true",
        "help": "serve a page for browsers of this machine, at 127.0.0.1",
      },
      "--port": _make_number(
        "port of that page; 0 for a free one", default=8000
      ),
    },
  ),
  "means": Tool(
    words="averages the scores of runs with several seeds",
    run=_run_means,
    flags={
      "workdirs": {
        "nargs": "+",
        "metavar": "WORKDIR",
        "help": "one of each run",
      },
      "--private": {
        "action": "store_true",
        "help": "show scores on private queries, which must not be shared, too",
      },
    },
  ),
  "corpus_overlap": Tool(
    words="measures how many queries and documents a public corpus holds: private",
    run=_run_corpus_overlap,
    flags={
      "--corpus": _make_required("a glob of text or JSONL files, in quotes"),
      "--workdir": _make_required(
        "working directory of a run with prepared data"
      ),
      "--quiet": _QUIET,
    },
  ),
  "leakage": Tool(
    words="`leakage check` finds test queries in a training log: private; exits with"
    " 3 for CI",
    run=_run_leakage_check,
    flags={
      "tool": {"choices": ("check",), "help": "what to do"},
      "--train": _make_required(
        "the log, streamed: a source such as beir:DIR, msmarco:DIR or"
        " ir_datasets:ID; or a file: id, tab, query; or a TSV with a header, CSV,"
        " JSONL or parquet with columns id and query"
      ),
      "--test": _make_required(
        "test queries: the same, or TREC topics as JSONL"
      ),
      "--train_split": "split of a source: reads only its judged queries",
      "--test_split": "the same for the test queries",
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
        "help": "exact, token_set, containment or trigrams; may be given"
        f" several times; default: {', '.join(_DETECTORS)}",
      },
      "--threshold": _make_number(
        "least similarity of a match, for all detectors but exact; default: each"
        " detector's own, calibrated on labelled pairs for precision .9",
        float,
      ),
      "--labels": "in place of --threshold: labelled pairs (JSONL), on which each"
      f" detector gets the lowest threshold with precision {_PRECISION}",
      "--fail_above": _make_number(
        "exit with 3 if more queries of the log leak"
      ),
      "--output": _make_required(
        "a folder: check.json, report.html, pairs.jsonl, clean_ids.txt; its"
        " owner alone may read them"
      ),
      "--processes": _make_number(
        "number of processes; default: one for each core"
      ),
      "--quiet": _QUIET,
    },
  ),
}
"""Tools by command."""
