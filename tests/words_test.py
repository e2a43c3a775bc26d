"""How the package and its pages speak: counts that may only fall.

A docstring begins with a verb, not with a relative clause, and a variable has a noun
for its name. A sentence for users has at most 30 words. Hits are counted: good prose
has none, and none do not make good prose.

  python tests/words_test.py  # prints the tables anew
"""

import ast
import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LONGEST = 30
"""Words of a sentence for users."""

OPENERS = (
  *("of", "what", "which", "whose", "where", "how", "and", "by", "those"),
  *("to whom", "in which", "with what", "that of"),
  *(f"says {word}" for word in ("what", "whether", "how")),
  *(f"returns {word}" for word in ("what", "whether", "how", "which", "when")),
  "returns where",
)
"""Beginnings of a docstring that name no subject, no action or no noun."""

NAMES = frozenset(
  "found made one said beside given alone place kept known wanted there what whole"
  " further theirs".split()
)
"""Names that name nothing."""

COUNTS = {
  "": {"openers": 0, "names": 0},
  "assets": {"openers": 0, "names": 0},
  "audit": {"openers": 0, "names": 0},
  "backends": {"openers": 0, "names": 0},
  "cli": {"openers": 0, "names": 0},
  "data": {"openers": 0, "names": 0},
  "federated": {"openers": 0, "names": 0},
  "generation": {"openers": 0, "names": 0},
  "launch": {"openers": 0, "names": 0},
  "leakage": {"openers": 0, "names": 0},
  "losses": {"openers": 0, "names": 0},
  "models": {"openers": 0, "names": 0},
  "optim": {"openers": 0, "names": 0},
  "privacy": {"openers": 0, "names": 0},
  "report": {"openers": 0, "names": 0},
  "retrieval": {"openers": 0, "names": 0},
  "runtime": {"openers": 0, "names": 0},
  "stages": {"openers": 0, "names": 0},
  "storage": {"openers": 0, "names": 0},
  "studies": {"openers": 0, "names": 0},
  "tools": {"openers": 0, "names": 0},
  "training": {"openers": 0, "names": 0},
}
"""Today's openers and names by folder. Lower a number when you lower the count."""

SHORT_PAGES = (
  "README.md",
  "SECURITY.md",
  "docs/CONTRIBUTING.md",
  "docs/README.md",
  "docs/architecture.md",
  "docs/audits.md",
  "docs/benchmarks.md",
  "docs/claims.md",
  "docs/extending.md",
  "docs/pitfalls.md",
  "docs/privacy.md",
  "docs/results.md",
  "docs/sensitivities.md",
  "docs/t5x.md",
  "docs/tutorials/adapter.md",
  "docs/tutorials/before_you_release.md",
  "docs/tutorials/contrastive_dp.md",
  "docs/tutorials/data_and_evaluation.md",
  "docs/tutorials/demo.md",
  "docs/tutorials/federated.md",
  "docs/tutorials/gin_experiment.md",
  "docs/tutorials/own_training_loop.md",
  "docs/tutorials/query_leakage.md",
  "docs/tutorials/ship_it.md",
  "docs/tutorials/your_data.md",
  "docs/tutorials/your_own_t5.md",
)
"""Pages without a longer sentence. Add a page when you have shortened it."""


def begins_badly(text: str) -> bool:
  """Says whether a docstring begins with one of `OPENERS`."""
  words = text.lower().split()
  return any(
    words[: len(opener)] == opener for opener in map(str.split, OPENERS)
  )


def count(source: str) -> collections.Counter:
  """Counts openers of docstrings and names of variables in a module."""
  counts = collections.Counter()
  for node in ast.walk(ast.parse(source)):
    match node:
      case ast.Expr(value=ast.Constant(value=str() as text)):
        counts["openers"] += begins_badly(text)
      case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
        counts["names"] += name in NAMES
  return counts


def folders() -> dict[str, list[pathlib.Path]]:
  """Returns the modules of each package folder, and of launch; "" for its own."""
  package, found = ROOT / "synthq_jax", collections.defaultdict(list)
  found["launch"] = [*(ROOT / "launch").glob("*.py")]
  for path in package.rglob("*.py"):
    parts = path.relative_to(package).parts
    found[parts[0] if len(parts) > 1 else ""].append(path)
  return dict(found)


def long_sentences(text: str, longest: int = LONGEST) -> list[str]:
  """Returns the sentences of a page that have more than `longest` words.

  Code, tables, headings and addresses are left out; items of a list are sentences.
  """
  text = re.sub(r"(?ms)^ *```.*?^ *```", "\n\n", text)
  text = re.sub(r"(?m)^ *(\|.*|#.*)$", "\n\n", text)
  text = re.sub(r"(?m)^ *([-*]|\d+\.) ", "\n\n", text)
  text = re.sub(r"`[^`]*`|\]\([^)]*\)", " x ", text)
  sentences = re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text)
  return [one for one in sentences if len(one.split()) > longest]


def pages() -> list[str]:
  """Returns the pages for users: all but docs/lab and the changelog."""
  docs = ROOT / "docs"
  paths = [*ROOT.glob("*.md"), *docs.glob("*.md"), *docs.glob("tutorials/*.md")]
  return sorted(
    str(path.relative_to(ROOT)) for path in paths if path.name != "changelog.md"
  )


@pytest.mark.parametrize(
  ("text", "is_bad"),
  [
    ("What a run reads.", True),
    ("Returns whether a row is there.", True),
    ("Says\n  how it ended.", True),
    ("Returns the rows of a run.", False),
    ("Whatever fits.", False),
    ("", False),
  ],
)
def test_the_counter_knows_a_bad_beginning(text, is_bad):
  assert begins_badly(text) == is_bad


def test_the_counter_sees_docstrings_fields_arguments_and_loops():
  source = '''
"""What this is."""
class A:
  """Reads files."""
  size: int = 0
  """Of the file."""
def read(given, path):
  """Says whether it is."""
  kept, text = given, "What is no docstring"
  for one in path:
    print(one, text)
'''
  assert count(source) == {"openers": 3, "names": 3}


def test_the_counter_of_long_sentences_leaves_out_code_and_tables():
  long = "word " * 31
  assert len(long_sentences(f"{long}. Short one.\n\n- {long}\n- short")) == 2
  assert long_sentences(f"{'word ' * 15}\n\n{'word ' * 16}") == []
  assert long_sentences(f"```\n{long}\n```\n| {long} |\n# {long}\n") == []
  assert long_sentences(f"Use `{long}` and [this]({long}) here.") == []


@pytest.mark.parametrize("kind", ["openers", "names"])
def test_counts_of_words_only_fall(kind):
  now = {
    folder: sum(
      (count(p.read_text("utf-8")) for p in paths), start=collections.Counter()
    )[kind]
    for folder, paths in folders().items()
  }
  allowed = {folder: COUNTS.get(folder, {}).get(kind, 0) for folder in now}
  risen = {f: (allowed[f], n) for f, n in now.items() if n > allowed[f]}
  assert not risen, f"{kind}: (allowed, got) by folder: rewrite what you added"


def test_the_table_of_counts_has_no_folder_that_is_gone():
  assert set(COUNTS) <= set(folders())


@pytest.mark.parametrize("page", SHORT_PAGES)
def test_a_page_for_users_has_no_long_sentence(page):
  assert long_sentences((ROOT / page).read_text("utf-8")) == []


def test_readme_is_one_page_of_shorter_sentences():
  text = (ROOT / "README.md").read_text("utf-8")
  assert long_sentences(text, 25) == []
  assert len(text.splitlines()) <= 140


def test_the_short_pages_are_pages_for_users():
  assert set(SHORT_PAGES) <= set(pages())


def print_table() -> None:
  """Prints today's counts and short pages, to be copied into this file."""
  for folder, paths in sorted(folders().items()):
    counts = collections.Counter(openers=0, names=0)
    for path in paths:
      counts.update(count(path.read_text("utf-8")))
    print(f'  "{folder}": {dict(counts)},'.replace("'", '"'))
  for page in pages():
    if not long_sentences((ROOT / page).read_text("utf-8")):
      print(f'  "{page}",')


if __name__ == "__main__":
  print_table()
