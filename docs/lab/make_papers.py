"""Reads the papers' result tables (tables.md) as data, and writes papers.json.

Every CSV block of tables.md becomes rows of text by column, under the block's id;
numbers stay text, since the papers' digits count. The list of contradictions
inside the papers and the few values between blocks come beside them.

  python docs/lab/make_papers.py ../shared/papers/tables.md > docs/lab/papers.json
"""

import csv
import json
import pathlib
import re
import sys

_UNNAMED = "qs_zero_by_set"  # the one block without an id: qs_zero, transposed


def parse(text: str) -> dict:
  """Returns the tables, the values between them and the contradictions.

  Args:
    text: of tables.md.

  Returns:
    "tables": id -> rows, each a dict of text by column; "between": lines with
    values outside of blocks; "contradictions": number -> paper and what does not
    fit.
  """
  tables: dict[str, list[dict[str, str]]] = {}
  for block in re.findall(r"```csv\n(.*?)```", text, re.DOTALL):
    header, *rows = csv.reader(block.splitlines())
    columns = _distinct(header)
    for cells in rows:
      row = dict(zip(columns, cells, strict=True))
      tables.setdefault(row.pop("id", _UNNAMED), []).append(row)
  outside = re.sub(r"```csv\n.*?```", "", text, flags=re.DOTALL)
  numbers = re.findall(r"(?m)^\| (C\d+) \| (\w+) \| (.*) \|$", outside)
  between = re.findall(
    r"(?ms)^((?:Scalars|Derived bound|- ndcg10|- recall10).*?)(?=\n\n|\n- |\Z)",
    outside,
  )
  return {
    "tables": tables,
    "between": [" ".join(line.split()) for line in between],
    "contradictions": {
      number: {"paper": paper, "what": what} for number, paper, what in numbers
    },
  }


def _distinct(header: list[str]) -> list[str]:
  """Names a column "sd" after the one before it."""
  return [
    f"{header[at - 1]}_sd" if name == "sd" else name
    for at, name in enumerate(header)
  ]


def main() -> None:
  """Writes the tables of the file that is named, as JSON."""
  read = parse(pathlib.Path(sys.argv[1]).read_text())
  json.dump(read, sys.stdout, indent=1, ensure_ascii=False)
  print()


if __name__ == "__main__":
  main()
