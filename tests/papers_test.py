"""The papers' values as data, and the page that sets ours beside them."""

import importlib.util
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAB = ROOT / "docs/lab"
TEXTS = ROOT.parent / "shared/papers"
TABLES = TEXTS / "tables.md"
PAPERS = json.loads((LAB / "papers.json").read_text())
PAGE = (ROOT / "docs/lab/reproduction.md").read_text()
COLUMNS = 6
"""What it is, the paper's values, ours, scale, agrees, command."""


def _parse(text: str) -> dict:
  spec = importlib.util.spec_from_file_location("m", LAB / "make_papers.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.parse(text)


def _rows() -> list[list[str]]:
  """The rows of the page's tables that have a cell for the command."""
  lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
  cells = [re.split(r" \| ", line.strip("| ")) for line in lines]
  headers = {"In the papers", "In the paper", "In the thesis", "The question"}
  return [row for row in cells if len(row) == COLUMNS and row[0] not in headers]


def _ids(text: str) -> list[str]:
  return [name for name in re.findall(r"`(\w+)`", text) if name in _TABLES]


_TABLES = PAPERS["tables"]

_QS, _THESIS = "DP query synthesis", "Federated answer sentences"
NUMBERED = {
  "dp_query_synthesis_later": (_QS, "1 2", "1 2 3 4 5 6 7"),
  "dp_query_synthesis_earlier": (_QS, "1 2", "1 2 3 4 5 6 7 8 9"),
  "logit_dp": ("Logit-DP", "1 2 3 4 5", "1 2 3 4"),
  "train_test_leakage": ("Train-test leakage", "1 2", "1 2 3 4 5 6 7 8"),
  "federated_answer_sentences_thesis": (
    _THESIS,
    "1.1 1.2 3.1 3.2 3.3 3.4 4.1",
    "3.1 3.2 3.3 3.4 4.1 4.2 4.3 4.4",
  ),
}
"""Text of a paper: its section of the page, numbers of its figures and tables."""


def _find_numbers(cell: str, kind: str) -> set[str]:
  """Returns the numbers behind "figure" or "table" in a first cell."""
  number = r"\d+(?:\.\d)?"
  found = set()
  for run in re.findall(
    rf"\b{kind}s? ((?:{number}(?:, | and | to )?)+)", cell, re.IGNORECASE
  ):
    found |= set(re.findall(number, run))
    for first, last in re.findall(r"(\d+) to (\d+)", run):
      found |= set(map(str, range(int(first), int(last) + 1)))
  return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_figure_and_table_of_a_paper_has_a_row(paper):
  section, figures, tables = NUMBERED[paper]
  (text,) = re.findall(rf"(?ms)^## {section}\n(.*?)(?=^## |\Z)", PAGE)
  first = [row[0] for row in _rows() if row[0] in text]
  version = paper.removeprefix("dp_query_synthesis_")
  if version != paper:  # two versions in one table
    first = re.findall(rf"(?:{version}|both): ([^;)]*)", " ".join(first))
  for kind, numbers in (("figure", figures), ("table", tables)):
    found = set().union(*(_find_numbers(cell, kind) for cell in first))
    assert found == set(numbers.split()), kind


@pytest.mark.parametrize("paper", NUMBERED)
def test_the_texts_mention_no_other_figure_or_table(paper):
  path = TEXTS / f"{paper}.txt"
  if not path.exists():
    pytest.skip("the papers are not at hand")
  text = path.read_text()
  for kind, numbers in zip(
    ("Fig(?:ures?|\\.)", "[Tt]ables?"), NUMBERED[paper][1:], strict=True
  ):
    found = set(re.findall(rf"\b{kind} (\d+(?:\.\d)?)", text))
    assert found and found <= set(numbers.split()), kind


@pytest.mark.skipif(not TABLES.exists(), reason="the papers are not at hand")
def test_the_data_are_those_of_the_papers_tables():
  assert _parse(TABLES.read_text()) == PAPERS


def test_tables_are_read_with_every_value_and_contradiction():
  read = _parse(
    "```csv\nid,a,sd,note\nx,1,0.20,!C1\nx,,,\n```\n\n"
    "Scalars: kappa 0.5;\nthreshold 0.9.\n\n"
    "```csv\nset,b\nf,2\n```\n\n| No. | Paper | What |\n| C1 | QS | 1 is 2 |\n"
  )
  assert read == {
    "tables": {
      "x": [
        {"a": "1", "a_sd": "0.20", "note": "!C1"},
        {"a": "", "a_sd": "", "note": ""},
      ],
      "qs_zero_by_set": [{"set": "f", "b": "2"}],
    },
    "between": ["Scalars: kappa 0.5; threshold 0.9."],
    "contradictions": {"C1": {"paper": "QS", "what": "1 is 2"}},
  }


def test_every_table_of_the_papers_has_a_row_with_all_its_cells():
  rows = _rows()
  assert len(rows) > 55
  assert {name for row in rows for name in _ids(row[0])} | set(
    _ids(PAGE)
  ) == set(_TABLES)
  of_results = {name for name in _TABLES if not name.endswith("_set")}
  assert of_results - {"qs_zero_by_set"} <= {
    name for row in rows for name in _ids(row[0])
  }
  for row in rows:
    assert all(cell.strip() for cell in row), row[0]
    assert re.search(r"`[^`]+`|\]\(|[Aa]s |the same|every run", row[-1]), row[0]


def _numbers(text: str) -> set[float]:
  """Decimal fractions and percentages; years, counts and sections are not."""
  text = re.sub(r"we compute.*?(?=[.;] [A-Z]|$)", "", text)
  text = re.sub(r"\(\.\d+, \.\d+; \.\d+, \.\d+\)", "", text)  # quotients, C10
  text = re.sub(
    r"(?i)(section|table|figure|chapter|equation)s? [\d., and]*", "", text
  )
  found = re.findall(r"(?<![\w.])-?\d*\.\d+(?![\d.])|(?<![\w.])\d+(?=%)", text)
  return {float(number) for number in found}


def _values(names: list[str]) -> set[float]:
  cells = [
    cell for name in names for row in _TABLES[name] for cell in row.values()
  ]
  cells += PAPERS["between"]
  cells += [each["what"] for each in PAPERS["contradictions"].values()]
  return {
    float(number)
    for cell in cells
    for number in re.findall(r"-?\d*\.?\d+", cell)
  }


@pytest.mark.parametrize(
  "row", [r for r in _rows() if _ids(r[0])], ids=lambda row: row[0][:40]
)
def test_the_papers_values_of_a_row_stand_in_its_tables(row):
  assert _numbers(row[1]) <= _values(_ids(row[0]))


def test_a_row_that_leans_on_a_contradiction_says_so():
  for name, rows in _TABLES.items():
    noted = {
      c for row in rows for c in re.findall(r"C\d+", row.get("note", ""))
    }
    said = " ".join(
      line for line in re.split(r"\n(?=\|)|\n\n", PAGE) if f"`{name}`" in line
    )
    missing = noted - set(re.findall(r"C\d+", said))
    assert not missing, f"{name}: {missing}"
  told = set(re.findall(r"\bC\d+", PAGE))
  assert told <= set(PAPERS["contradictions"])
  assert set(PAPERS["contradictions"]) <= told


def test_the_zero_shot_table_is_the_papers():
  for row in _TABLES["qs_zero_by_set"]:
    name, *values = row.values()
    cells = " | ".join(value.removeprefix("0") for value in values)
    assert f"| {name} | {cells} |" in PAGE
