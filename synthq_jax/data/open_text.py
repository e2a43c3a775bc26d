"""Reads freely licensed documentation and question sets as titled texts.

Every reader takes a folder and yields `Entry`: a title (a heading, a docstring's
first paragraph, or a question somebody asked) and what it stands above.
"""

import csv
import dataclasses
import html.parser
import json
import pathlib
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from synthq_jax.data import docstrings, rule_questions

__all__ = ["READERS", "Entry"]

_SPACE = re.compile(r"\s+")
_FEWEST_WORDS, _ABOUT = 8, 4  # of a solution that says something; sentences
_NUMBERING = re.compile(r"^([0-9]+\.|[0-9]+(\.[0-9]+)+\.?|[QA]?\d*[:.)])\s+")
_TAGS = frozenset("h1 h2 h3 h4 h5 dt p pre script style".split())


@dataclasses.dataclass(frozen=True)
class Entry:
  """A title and the text below it."""

  kind: str
  """"question" (asked by a person), "rule" (by a rule), "summary", "heading"."""
  title: str
  """On one line, without markup."""
  text: str
  """On one line, without markup; may be empty for a question alone."""


def _plain(text: str) -> str:
  """Takes out inline markup of Markdown, reStructuredText and POD."""
  text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
  text = re.sub(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", text)
  text = re.sub(r"`([^`<]+?)\s*<[^>]*>`_*", r"\1", text)
  text = re.sub(r"[A-Z]<+\s*([^<>]*?)\s*>+", r"\1", text)
  text = re.sub(r"<[^>]{1,200}>|\{[{%#][^}]*[}%#]\}|\{[#:./][^}]*\}", " ", text)
  text = re.sub(r"`+|\*\*|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)|\|", "", text)
  return _SPACE.sub(" ", text).strip()


def _entries(title: str, text: str, kind: str = "heading") -> Iterator[Entry]:
  title = _NUMBERING.sub("", _plain(title)).strip("# ¶:")
  text = _plain(text)
  if title and text:
    yield Entry(
      "question" if rule_questions.is_question(title) else kind, title, text
    )


def _read(path: pathlib.Path) -> str:
  return path.read_text(encoding="utf-8", errors="ignore")


def _markdown(path: pathlib.Path) -> Iterator[Entry]:
  text = re.sub(r"^(```|~~~).*?^\1", "", _read(path), flags=re.M | re.S)
  front = re.match(r"^---\n(.*?)\n---\n", text, re.S)
  if front:
    text = text[front.end() :]
    asked = re.search(r"^questions:\n((?:\s*- .*\n?)+)", front[1], re.M)
    for line in asked[1].splitlines() if asked else ():
      yield from _entries(line.strip(' -"'), text[:3000], "question")
    title = re.search(r"^title: *(.+)$", front[1], re.M)
    summary = re.search(r"^description: *(.{20,200})$", front[1], re.M)
    if summary:
      yield from _entries(summary[1].strip("\"'>"), text[:2000], "summary")
    if title:
      yield from _entries(title[1].strip("\"'"), _start(text))
  text = re.sub(r"<!--.*?-->|<details>|</?[a-z]+[^>]*>", " ", text, flags=re.S)
  parts = re.split(r"^(?:\s*\d+\. )?(#{1,6} .+)$", text, flags=re.M)
  for heading, body in zip(parts[1::2], parts[2::2], strict=True):
    body = re.sub(r"^( {4}|\t|\||>|:::|\s*[-*] \[).*$", "", body, flags=re.M)
    yield from _entries(heading, re.sub(r"^\s*[-*+] ", "", body, flags=re.M))


def _start(markdown: str) -> str:
  return re.split(r"^#", markdown, maxsplit=1, flags=re.M)[0]


def _restructured(path: pathlib.Path) -> Iterator[Entry]:
  lines = _read(path).expandtabs().splitlines()
  title, body = "", []
  skipping = -1
  for number, line in enumerate([*lines, "end", "==="]):
    following = lines[number + 1] if number + 1 < len(lines) else "==="
    underlined = (
      re.match(r"^([=\-~^\"'#*+.`])\1{2,}\s*$", following)
      and 3 <= len(line.strip()) <= len(following.strip()) + 2
      and not re.match(r"^\W+$", line)
    )
    if underlined or number >= len(lines):
      yield from _entries(title, " ".join(body))
      title, body = line.strip(), []
      continue
    indent = len(line) - len(line.lstrip())
    if skipping >= 0 and line.strip() and indent <= skipping:
      skipping = -1
    if skipping < 0 and line.strip().startswith(".. "):
      skipping = indent
    elif skipping < 0 and not re.match(r"^\W*$", line):
      if not re.match(r"^\s*(:[\w ]+:|>>>|\.\.\. |\$ )", line):
        body.append(line.strip().replace("::", ":"))
      if line.rstrip().endswith("::"):
        skipping = indent


def _pod(path: pathlib.Path) -> Iterator[Entry]:
  parts = re.split(r"^=(?:head\d|item) +(.+)$", _read(path), flags=re.M)
  for heading, body in zip(parts[1::2], parts[2::2], strict=True):
    body = re.sub(r"^([ \t=].*)$", "", body, flags=re.M)
    yield from _entries(heading, body)


class _Page(html.parser.HTMLParser):
  """Collects headings and the paragraphs below each."""

  def __init__(self):
    super().__init__()
    self.sections = [["", ""]]
    self._inside: list[str] = []

  def handle_starttag(self, tag, attrs):
    if re.match(r"h[1-6]$|dt$", tag):
      self.sections.append(["", ""])
    if tag in _TAGS:
      self._inside.append(tag)

  def handle_endtag(self, tag):
    if tag in self._inside:
      while self._inside.pop() != tag:
        pass

  def handle_data(self, data):
    if self._inside:
      if self._inside[-1] == "p":
        self.sections[-1][1] += data
      elif self._inside[-1].startswith(("h", "dt")):
        self.sections[-1][0] += data


def _hypertext(path: pathlib.Path) -> Iterator[Entry]:
  page = _Page()
  page.feed(_read(path))
  for title, text in page.sections:
    yield from _entries(re.sub(r"^(Chapter )?[\d.]+", "", title.strip()), text)


def _textbook(path: pathlib.Path) -> Iterator[Entry]:
  """OpenStax' CNXML: sections, exercises with their solutions, definitions."""
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", _read(path))
  text = re.sub(r"(</?)\w+:(\w+)", r"\1\2", text)
  try:
    root = ElementTree.fromstring(text)
  except ElementTree.ParseError:
    return
  for parent in root.iter():
    for child in [c for c in parent if c.tag in ("figure", "table", "math")]:
      tail = child.tail or ""
      parent.remove(child)
      parent.text = (
        (parent.text or "") + " " + tail if len(parent) == 0 else (parent.text)
      )
  title = root.findtext("title") or ""
  content = root.find("content")
  if content is None:
    return
  yield from _entries(title, _paragraphs(content))
  for section in content.iter("section"):
    yield from _entries(section.findtext("title") or "", _paragraphs(section))
  sentences = _sentences(content)
  for exercise in content.iter("exercise"):
    asked = _joined(exercise.find("problem/para"))
    if asked.endswith("?") and len(asked.split()) <= 30:
      answer = _answer(exercise, asked, sentences)
      yield from _entries(asked, answer, "question")
  for definition in root.iter("definition"):
    term = definition.findtext("term") or ""
    meaning = _joined(definition.find("meaning"))
    if meaning:
      yield from _entries(term, f"{term}: {meaning}")


def _sentences(content) -> list[str]:
  """Returns the sentences of a module outside its exercises."""
  asked = {id(node) for e in content.iter("exercise") for node in e.iter()}
  texts = (_joined(n) for n in content.iter("para") if id(n) not in asked)
  return [s for text in texts for s in re.split(r"(?<=[.!?]) (?=[A-Z])", text)]


def _answer(exercise, asked: str, sentences: list[str]) -> str:
  """Returns the solution of an exercise, or what the module says about it.

  Where the solution names one of several choices, that is the four sentences in
  a row that have most of the words of the question and of the right choice; none
  where fewer than half of these words are there.
  """
  solution = _joined(exercise.find("solution")).strip()
  if len(solution.split()) >= _FEWEST_WORDS:
    return solution
  choices = exercise.findall("problem/list/item")
  place = ord(solution[0].upper()) - ord("A") if solution else -1
  chosen = _joined(choices[place]) if 0 <= place < len(choices) else ""
  wanted = {w for w in docstrings.words(f"{asked} {chosen}") if len(w) > 3}
  if len(wanted) < 3 or not sentences:
    return ""
  said = [wanted.intersection(docstrings.words(s)) for s in sentences]
  windows = [
    len(set().union(*said[i : i + _ABOUT])) + len(said[i]) / 100
    for i in range(max(1, len(said) - _ABOUT + 1))
  ]
  best = max(range(len(windows)), key=windows.__getitem__)
  if windows[best] < 0.5 * len(wanted):
    return ""
  return " ".join(sentences[best : best + _ABOUT])


def _joined(node) -> str:
  return "" if node is None else _SPACE.sub(" ", " ".join(node.itertext()))


def _paragraphs(node) -> str:
  return " ".join(_joined(child) for child in node if child.tag == "para")


def _code(path: pathlib.Path) -> Iterator[Entry]:
  for entry in docstrings.read_file(path):
    yield Entry("summary", entry.first, entry.rest)


def _pairs_json(path: pathlib.Path) -> Iterator[Entry]:
  """SQuAD's format; of a long context what stands around the answer."""
  for article in json.loads(_read(path))["data"]:
    for paragraph in article["paragraphs"]:
      context = paragraph["context"]
      for asked in paragraph["qas"]:
        begin = 0
        if len(context) > 1200 and asked.get("answers"):
          begin = max(0, asked["answers"][0]["answer_start"] - 250)
          begin = context.rfind(". ", 0, begin) + 1 if begin else 0
        text = context[begin : begin + 900]
        yield Entry("question", asked["question"].strip(), text.strip())


def _lines_json(path: pathlib.Path) -> Iterator[Entry]:
  for line in _read(path).splitlines():
    row = json.loads(line)
    asked = row.get("question_text") or row.get("question")
    yield Entry("question", asked, _untokenize(row.get("paragraph_text", "")))


def _untokenize(text: str) -> str:
  for old, new in (("-lrb-", "("), ("-rrb-", ")"), ("``", '"'), ("''", '"')):
    text = text.replace(old, new)
  text = re.sub(r" ([.,;:?!)%]|'s\b|n't\b)", r"\1", text)
  return _SPACE.sub(" ", text.replace("( ", "(")).strip()


def _parallel(path: pathlib.Path) -> Iterator[Entry]:
  """Lines of questions (tgt-X.txt) beside lines of sentences (src-X.txt)."""
  texts = _read(path.with_name(path.name.replace("tgt", "src"))).splitlines()
  for asked, text in zip(_read(path).splitlines(), texts, strict=True):
    yield Entry("question", _untokenize(asked), _untokenize(text))


def _blocks(path: pathlib.Path) -> Iterator[Entry]:
  """QAMR: blocks of a name, a sentence, and lines that begin with a question."""
  for block in _read(path).split("\n\n"):
    _, text, *lines = (
      block.strip("\n").split("\n") if "\n" in block else ("", "")
    )
    asked = [re.split(r"\s{2,}|\t", line)[0] for line in lines]
    for title in sorted(set(asked), key=asked.index)[:4]:
      if title.endswith("?"):
        yield Entry("question", _untokenize(title), _untokenize(text))


def _table(path: pathlib.Path) -> Iterator[Entry]:
  """Tab-separated, with columns question and answer, and lang."""
  with open(path, encoding="utf-8", newline="") as stream:
    for row in csv.DictReader(stream, delimiter="\t"):
      if row.get("lang") == "en" and row["answer"]:
        yield Entry("question", _plain(row["question"]), _plain(row["answer"]))


def _rated(path: pathlib.Path) -> Iterator[Entry]:
  """A question and the share of readers who called it well-formed."""
  for line in _read(path).splitlines():
    asked, rating = line.split("\t")
    if float(rating) >= 0.8:
      yield Entry("question", _untokenize(asked), "")


def _trivia(path: pathlib.Path) -> Iterator[Entry]:
  for block in _read(path).split("#Q ")[1:]:
    asked = _SPACE.sub(" ", block.split("\n^")[0]).strip()
    if asked.endswith("?"):
      yield Entry("question", asked, "")


def _asked_json(path: pathlib.Path) -> Iterator[Entry]:
  for row in json.loads(_read(path)):
    yield Entry("question", row["qText"], "")


def _meaning(path: pathlib.Path) -> Iterator[Entry]:
  """WordNet's data.noun: what words mean; of every fourth, asked by rule."""
  lines = [line for line in _read(path).splitlines() if " | " in line]
  for number, line in enumerate(lines):
    head, gloss = line.split(" | ", 1)
    text = gloss.split('; "')[0].strip()
    if head.startswith(" ") or number % 4 or len(text.split()) < 8:
      continue
    name = head.split()[4].replace("_", " ")
    article = ("an " if name[0] in "aeiou" else "a ") if name.islower() else ""
    start = f"{article}{name}"
    text = f"{start[0].upper()}{start[1:]} is {text}."
    yield Entry("rule", f"what is {start}", text)


READERS = {
  "asked_json": _asked_json,
  "blocks": _blocks,
  "code": _code,
  "html": _hypertext,
  "lines_json": _lines_json,
  "markdown": _markdown,
  "pairs_json": _pairs_json,
  "parallel": _parallel,
  "pod": _pod,
  "rated": _rated,
  "rst": _restructured,
  "table": _table,
  "textbook": _textbook,
  "trivia": _trivia,
  "wordnet": _meaning,
}
"""From a file to its entries, by the name that a manifest gives."""
