"""The pages: every relative link, anchor and test that they name is there."""

import collections
import functools
import importlib
import inspect
import pathlib
import re
import string

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [
  *sorted(ROOT.glob("*.md")),
  ROOT / "findings" / "README.md",
  *sorted((ROOT / "docs").rglob("*.md")),
]
USER_PAGES = [
  page
  for page in PAGES
  if "lab" not in page.parts and page.name != "changelog.md"
]
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#+ +(.+?) *#* *$", re.MULTILINE)


def links(text: str) -> list[str]:
  """The targets of links and images, those in code left out."""
  without = re.sub(r"`[^`\n]*`", "", _CODE.sub("", text))
  return [
    target
    for target in _LINK.findall(without)
    if not re.match(r"[a-z]+:", target)
  ]


def anchors(text: str) -> set[str]:
  """The anchors of a page's headings, as GitHub makes them."""
  found = set()
  seen = collections.Counter()
  dropped = set(string.punctuation) - set("-_")
  for heading in _HEADING.findall(_CODE.sub("", text)):
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    name = "".join(x for x in words if x not in dropped).replace(" ", "-")
    found.add(f"{name}-{seen[name]}" if seen[name] else name)
    seen[name] += 1
  return found


@functools.cache
def read(path: pathlib.Path) -> str:
  return path.read_text()


def broken(page: pathlib.Path, text: str) -> list[str]:
  """The links of a page that lead nowhere."""
  found = []
  for target in links(text):
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
      found.append(target)
    elif anchor and path.suffix == ".md":
      known = anchors(text if path == page else read(path))
      found += [target] if anchor not in known else []
  return found


def test_the_reader_of_links_sees_what_leads_nowhere():
  text = (
    "# A `b`: c, d's\n[x](#a-b-c-ds) [x](#a-b) ![x](no.svg)\n## Two\n## Two\n"
    '[x](#two-1) [x](docs "a title") [y](docs/privacy.md#no) `[z](no.md)`\n'
    "```\n# Code\n[x](nowhere)\n```\n[x](https://a.b/c) [x](#code)\n"
  )
  missing = ["#a-b", "no.svg", "docs/privacy.md#no", "#code"]
  assert broken(ROOT / "README.md", text) == missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_relative_link_and_anchor_leads_somewhere(page):
  assert broken(page, read(page)) == []


def test_there_are_links_to_follow():
  assert sum(len(links(read(page))) for page in PAGES) > 200


def test_every_test_that_a_page_names_is_there():
  known = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"(?m)^def (test_\w+)", path.read_text())
  }
  for page in PAGES:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", read(page)))
    assert named <= known, page


def test_every_pitfall_has_its_tests_under_the_same_number():
  short = read(ROOT / "docs/pitfalls.md")
  long = read(ROOT / "docs/lab/pitfall_tests.md")
  named = {
    int(number): " ".join(title.split())
    for number, title in re.findall(r"(?ms)^(\d+)\. \*\*(.+?)\.\*\*", short)
  }
  headings = re.findall(r"(?m)^### (\d+)\. (.+)$", long)
  rows = re.findall(r"(?m)^\| (\d+) \| ", long)
  assert named == {int(number): title for number, title in headings}
  assert sorted(map(int, rows)) == sorted(named)
  assert sorted(named) == list(range(1, len(named) + 1))


def settings(text: str) -> set[str]:
  """Returns the names behind `--gin.` of a page, with their scope."""
  return set(re.findall(r"--gin\.([\w./]+?)(?==|`| )", text))


def has_setting(name: str) -> bool:
  """Says whether a macro or a field of a configuration has this name."""
  module, _, field = name.rpartition("/")[2].partition(".")
  if not field:
    macro = re.compile(rf"(?m)^{module} = ")
    files = (ROOT / "gin_configs").rglob("*.gin")
    return any(macro.search(read(path)) for path in files)
  cls, _, attribute = field.partition(".")
  for path in sorted((ROOT / "synthq_jax").rglob(f"{module}.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    owner = getattr(importlib.import_module(".".join(parts)), cls, None)
    if owner and attribute in inspect.signature(owner).parameters:
      return True
  return False


def test_the_reader_of_settings_knows_macros_and_fields():
  text = "--gin.EPSILON=3 `--gin.NO=1` --gin.a/plan.Rows.ltr='()' --gin.plan.Rows.x=1"
  names = settings(text)
  assert {name for name in names if has_setting(name)} == {
    "EPSILON",
    "a/plan.Rows.ltr",
  }
  assert len(names) == 4


OTHERS = {"extending.md", "t5x.md"}
"""Pages with settings of their own example, and of T5X."""


@pytest.mark.parametrize(
  "page",
  [page for page in USER_PAGES if page.name not in OTHERS],
  ids=lambda p: p.name,
)
def test_every_setting_that_a_page_names_exists(page):
  unknown = {name for name in settings(read(page)) if not has_setting(name)}
  assert unknown <= {"NAME", "CLIPNORM"}, "a placeholder; a mistake on purpose"
