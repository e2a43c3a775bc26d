"""Makes the shipped checkpoint again: a small T5, from public text alone.

Text of sources.json, a vocabulary, one cache of tokens, a T5, the curriculum.
The queries of the demo set and of every set of --held_out are left out of all
of it: no 8 words of any of them in a row remain, and result.json counts the
sentences that were dropped for that. Interrupted, it resumes:

  pip install "synthq_jax[run,cuda]"
  python docs/lab/shipped_t5/make_checkpoint.py --workdir=runs/pretrain \
    --held_out data/boolq data/medquad

One H100: 15 minutes (41 ms a step), 6 GiB. Reading the text takes 6 minutes on
a CPU before, and 2 GB of sources by git, pip and apt-get. tokens.npz, text/ and
vocabulary.model of a working directory are enough for another machine.
"""

import argparse
import collections
import csv
import dataclasses
import functools
import gzip
import hashlib
import html.parser
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import field_kinds
from synthq_jax.data import (
  beir,
  docstrings,
  environment_docs,
  sentences,
  shipped,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.losses import contrastive, seq2seq
from synthq_jax.models import dual_encoder, t5, t5_checkpoints, t5_config
from synthq_jax.runtime import workspace
from synthq_jax.storage import array_files, artifacts
from synthq_jax.training import loop

MANIFEST = pathlib.Path(__file__).with_name("sources.json")
SHAPE = t5_config.T5Config(
  vocab_size=8192,
  emb_dim=192,
  num_heads=6,
  head_dim=32,
  mlp_dim=512,
  num_encoder_layers=4,
  num_decoder_layers=2,
  logits_via_embedding=True,
  dropout_rate=0.1,
  dtype="bfloat16",
)
"""The shape of the shipped checkpoint while it is trained."""


# Questions that rules make of titles and sentences.

_NAME = r"(?P<name>(?:the |an? )?[^,.;:()]{3,45}?)"
_BE = r"(?:is|are|was|were)"
_DEFINES = re.compile(
  rf"^{_NAME}(?: \([^)]*\))? (?P<be>{_BE})"
  r" (?P<rest>(?:an?|the|one|any|used|known|caused|made|found|defined|called)\b"
  r"[^,.;:()]*)",
  re.IGNORECASE,
)
_PASSIVE = re.compile(
  rf"^{_NAME} (?P<be>{_BE})(?: (?:usually|often|also|generally|typically))?"
  r" (?P<verb>\w{2,}ed|found|made|built|known|written|held|given|taken|grown|born"
  r"|sold|spoken|worn|played|led|sent|kept|seen|drawn|stored)"
  r" (?P<by>by|in|for|from|to|with|on|at|as|into) (?P<rest>[^,.;:()]+)",
  re.IGNORECASE,
)
_CAN = re.compile(
  rf"^{_NAME} (?P<can>can|may|should|must) (?P<rest>(?!be\b|not\b|also\b)[a-z]+ [^,.;:()]+)"
)


def _third_person(base: str) -> str:
  if base == "have":
    return "has"
  if re.search("[^aeiou]y$", base):
    return f"{base[:-1]}ies"
  return f"{base}es" if base.endswith("s") else f"{base}s"


def _gerund(base: str) -> str:
  last = base[-1] if base in _DOUBLED else ""
  return f"{base.removesuffix('e')}{last}ing"


_DOUBLED = "control debug get plot run set".split()
_BASES = {  # by the third person
  _third_person(base): base
  for base in (
    "absorb accept affect allow apply bind block break call carry cause change"
    " check combine compare compute contain control convert cover create decrease"
    " define describe destroy determine enable explain explore express form"
    " generate give handle have help hold identify improve include increase"
    " indicate inhibit involve keep limit load make manage mean measure move need"
    " offer perform prevent print process produce promote protect provide read"
    " receive reduce regulate release remove represent require return run send"
    " separate set show specify stimulate store support surround take tell"
    " transport treat use write"
  ).split()
}
_GERUNDS = {
  _gerund(base): base
  for base in (
    "add apply build call change check choose combine compare compute configure"
    " connect control convert copy create customize debug define delete deploy"
    " disable enable extend find fix get handle implement import improve install"
    " load make manage measure modify monitor open override pass perform plot"
    " prepare prevent protect read remove restore run save select send set share"
    " solve sort start store test update upgrade use validate view work write"
  ).split()
}
_PASTS = {
  "became": "become", "began": "begin", "built": "build", "caused": "cause",
  "created": "create", "defeated": "defeat", "developed": "develop",
  "discovered": "discover", "established": "establish", "formed": "form",
  "founded": "found", "gave": "give", "introduced": "introduce",
  "invaded": "invade", "invented": "invent", "joined": "join",
  "killed": "kill", "led": "lead", "made": "make", "passed": "pass",
  "produced": "produce", "proposed": "propose", "published": "publish",
  "ruled": "rule", "signed": "sign", "started": "start", "took": "take",
  "won": "win", "wrote": "write",
}  # fmt: skip
_ACTIVE = re.compile(
  rf"^{_NAME} (?P<verb>{'|'.join([*_BASES, *_PASTS])}) (?P<rest>[^,.;:()]+)"
)
_PRONOUN = re.compile(
  r"^(this|that|these|those|it|they|he|she|we|you|i|there|here|if|when|in|on|at"
  r"|one|each|all|some|many|most|both|another|such|what|which|for|as|to|by|with"
  r"|from|because|although|however|but|and|or|not|his|her|its|their|our|your"
  r"|who|how|why|where|while|after|before|since|during|thus|then|so"
  r"|no|nothing|everyone|people|others|only|first|next|see|note)\b",
  re.IGNORECASE,
)
_INSIDE = re.compile(
  r"\b(which|that|who|whose|and|or|but|it|they|he|she|we|you|not|if|when|is|are"
  r"|was|were|has|have|had|can|may|will|would|should|must)\b"
)
_POINTS = re.compile(  # at something else on the page, or begins with a verb
  r"\b(following|example|figure|table|below|above|section|chapter|code|page)\b"
  r"|^\w+s (the|an?)\b|(ly|also|always|never|often|then|now)$"
)
_WHO = re.compile(
  r"\b(born|king|queen|president|emperor|writer|scientist|philosopher)\b"
)
_YEAR = re.compile(r"^(?:the )?(?:\w+ )?(?:1[0-9]{3}|20[0-9]{2})\b")
_AGENT = re.compile(r"^(?:[A-Z][a-z]+ ){1,3}[A-Z]?[a-z]*|^[A-Z][a-z]+")
_LONGEST = 9  # words behind the verb
_OPEN_END = re.compile(
  r"\b(the|an?|of|in|by|to|for|with|from|and|or|as|at|on|is|are|which|that|its"
  r"|their)$"
)


def is_question(text: str) -> bool:
  """Whether a title asks.

  >>> is_question("How do I copy a file?"), is_question("Copying files")
  (True, False)
  """
  return text.endswith("?") or bool(
    re.match(r"(how|why|when|what|where) ", text, re.IGNORECASE)
  )


def ask(title: str, text: str) -> list[str]:
  """Returns questions that a text answers, by rules of its title and start.

  Args:
    title: a heading.
    text: what stands below it, or any sentence.

  Returns:
    None, one or several questions, lower case, without a question mark.

  >>> ask("Bones", "A bone is an organ of the skeleton. It grows.")
  ['what is a bone', 'is a bone an organ of the skeleton']
  >>> ask("Installing the server", "Run the installer.")
  ['how do i install the server']
  >>> ask("Symptoms of scurvy", "Tired legs.")
  ['what are the symptoms of scurvy']
  >>> ask("", "The pancreas produces insulin.")[1:]
  ['what produces insulin', 'does the pancreas produce insulin']
  """
  return list(
    dict.fromkeys(
      [
        *_of_title(title.lower().strip(" .:")),
        *_of_definition(text),
        *_of_passive(text),
        *_of_active(text),
      ]
    )
  )


def _of_title(name: str) -> Iterator[str]:
  words = name.split()
  if not 2 <= len(words) <= 8 or not re.match(r"^[a-z][a-z ,'-]+$", name):
    return
  if verb := _GERUNDS.get(words[0]):
    yield f"how do i {verb} {' '.join(words[1:])}"
  elif " of " in name and (part := words[0]) in _PARTS:
    be = "are" if part.endswith("s") and part != "diagnosis" else "is"
    yield f"what {be} the {part} {' '.join(words[1:])}"
  elif " vs " in name or " versus " in name:
    left, right = re.split(r" vs | versus ", name, maxsplit=1)
    yield f"what is the difference between {left} and {right}"


def _named(pattern: re.Pattern, text: str) -> re.Match | None:
  """Returns the match where what it names is a name of at most five words."""
  match = pattern.match(text)
  if not match or _PRONOUN.match(match["name"]):
    return None
  name = match["name"].lower().strip()
  if name in ("the", "a", "an") or len(name.split()) > 5:
    return None
  if _POINTS.search(name):
    return None
  return match


def _plainly_named(pattern: re.Pattern, text: str) -> re.Match | None:
  """As `_named`, where the name is not a clause of its own."""
  match = _named(pattern, text)
  if match and _INSIDE.search(match["name"].lower()):
    return None
  return match


def _of_definition(text: str) -> Iterator[str]:
  if not (match := _named(_DEFINES, text)):
    return
  name, be = match["name"].lower().strip(), match["be"].lower()
  rest = match["rest"].lower().strip()
  who = be in ("was", "were") and _WHO.search(rest)
  yield f"{'who' if who else 'what'} {be} {name}"
  if 3 <= len(rest.split()) <= 12:
    yield f"{be} {name} {rest}"


def _of_passive(text: str) -> Iterator[str]:
  if not (match := _plainly_named(_PASSIVE, text)):
    return
  name, be, verb, by = (
    match[k].lower().strip() for k in ("name", "be", "verb", "by")
  )
  rest = match["rest"].strip()
  if by == "by":
    is_agent = be in ("was", "were") and _AGENT.match(rest)
    yield f"{'who' if is_agent else 'what'} {be} {name} {verb} by"
  elif by in ("in", "on", "at"):
    is_time = _YEAR.match(rest)
    yield f"{'when' if is_time else 'where'} {be} {name} {verb}"
  else:
    yield f"what {be} {name} {verb} {by}"
  if _is_whole(rest):
    yield f"{be} {name} {verb} {by} {rest.lower()}"


def _of_active(text: str) -> Iterator[str]:
  match = _plainly_named(_CAN, text)
  if match and _is_whole(match["rest"]):
    yield f"{match['can']} {match['name'].lower()} {match['rest'].lower()}"
  if not (match := _plainly_named(_ACTIVE, text)):
    return
  name, verb, rest = (match[k].strip() for k in ("name", "verb", "rest"))
  is_past, name, lower = verb in _PASTS, name.lower(), rest.lower()
  base = (_PASTS if is_past else _BASES)[verb]
  do = "did" if is_past else "does"
  yield f"what {do} {name} {base}"
  if _is_whole(rest):
    yield f"{'who' if is_past else 'what'} {verb} {lower}"
    yield f"{do} {name} {base} {lower}"
  elif is_past and (year := re.search(r" in (?:1\d{3}|20\d\d)\b", lower)):
    yield f"when did {name} {base} {lower[: year.start()]}"


def _is_whole(rest: str) -> bool:
  """Whether the rest of a clause is short and does not break off."""
  is_short = 1 <= len(rest.split()) <= _LONGEST
  return is_short and not _OPEN_END.search(rest.strip())


_PARTS = frozenset(
  "advantages benefits causes characteristics complications components"
  " consequences definition diagnosis diseases disorders effects elements"
  " examples features functions function goals history importance limitations"
  " origins parts properties purpose reasons results risks role signs structure"
  " symptoms treatment types uses".split()
)


# Files of freely licensed documentation and question sets, as titled texts.

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


def _make_entries(
  title: str, text: str, kind: str = "heading"
) -> Iterator[Entry]:
  title = _NUMBERING.sub("", _plain(title)).strip("# ¶:")
  text = _plain(text)
  if title and text:
    yield Entry("question" if is_question(title) else kind, title, text)


def _read_text(path: pathlib.Path) -> str:
  return path.read_text(encoding="utf-8", errors="ignore")


def _markdown(path: pathlib.Path) -> Iterator[Entry]:
  text = re.sub(r"^(```|~~~).*?^\1", "", _read_text(path), flags=re.M | re.S)
  front = re.match(r"^---\n(.*?)\n---\n", text, re.S)
  if front:
    text = text[front.end() :]
    asked = re.search(r"^questions:\n((?:\s*- .*\n?)+)", front[1], re.M)
    for line in asked[1].splitlines() if asked else ():
      yield from _make_entries(line.strip(' -"'), text[:3000], "question")
    title = re.search(r"^title: *(.+)$", front[1], re.M)
    summary = re.search(r"^description: *(.{20,200})$", front[1], re.M)
    if summary:
      yield from _make_entries(summary[1].strip("\"'>"), text[:2000], "summary")
    if title:
      yield from _make_entries(
        title[1].strip("\"'"), _text_before_headings(text)
      )
  text = re.sub(r"<!--.*?-->|<details>|</?[a-z]+[^>]*>", " ", text, flags=re.S)
  parts = re.split(r"^(?:\s*\d+\. )?(#{1,6} .+)$", text, flags=re.M)
  for heading, body in zip(parts[1::2], parts[2::2], strict=True):
    body = re.sub(r"^( {4}|\t|\||>|:::|\s*[-*] \[).*$", "", body, flags=re.M)
    yield from _make_entries(
      heading, re.sub(r"^\s*[-*+] ", "", body, flags=re.M)
    )


def _text_before_headings(markdown: str) -> str:
  return re.split(r"^#", markdown, maxsplit=1, flags=re.M)[0]


def _restructured(path: pathlib.Path) -> Iterator[Entry]:
  lines = _read_text(path).expandtabs().splitlines()
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
      yield from _make_entries(title, " ".join(body))
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
  parts = re.split(r"^=(?:head\d|item) +(.+)$", _read_text(path), flags=re.M)
  for heading, body in zip(parts[1::2], parts[2::2], strict=True):
    body = re.sub(r"^([ \t=].*)$", "", body, flags=re.M)
    yield from _make_entries(heading, body)


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
  page.feed(_read_text(path))
  for title, text in page.sections:
    yield from _make_entries(
      re.sub(r"^(Chapter )?[\d.]+", "", title.strip()), text
    )


def _textbook(path: pathlib.Path) -> Iterator[Entry]:
  """OpenStax' CNXML: sections, exercises with their solutions, definitions."""
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", _read_text(path))
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
  yield from _make_entries(title, _paragraphs(content))
  for section in content.iter("section"):
    yield from _make_entries(
      section.findtext("title") or "", _paragraphs(section)
    )
  sentences = _sentences(content)
  for exercise in content.iter("exercise"):
    asked = _joined(exercise.find("problem/para"))
    if asked.endswith("?") and len(asked.split()) <= 30:
      answer = _answer(exercise, asked, sentences)
      yield from _make_entries(asked, answer, "question")
  for definition in root.iter("definition"):
    term = definition.findtext("term") or ""
    meaning = _joined(definition.find("meaning"))
    if meaning:
      yield from _make_entries(term, f"{term}: {meaning}")


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
  shared = [wanted.intersection(docstrings.words(s)) for s in sentences]
  windows = [
    len(set().union(*shared[i : i + _ABOUT])) + len(shared[i]) / 100
    for i in range(max(1, len(shared) - _ABOUT + 1))
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
  for article in json.loads(_read_text(path))["data"]:
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
  for line in _read_text(path).splitlines():
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
  texts = _read_text(
    path.with_name(path.name.replace("tgt", "src"))
  ).splitlines()
  for asked, text in zip(_read_text(path).splitlines(), texts, strict=True):
    yield Entry("question", _untokenize(asked), _untokenize(text))


def _blocks(path: pathlib.Path) -> Iterator[Entry]:
  """QAMR: blocks of a name, a sentence, and lines that begin with a question."""
  for block in _read_text(path).split("\n\n"):
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
  for line in _read_text(path).splitlines():
    asked, rating = line.split("\t")
    if float(rating) >= 0.8:
      yield Entry("question", _untokenize(asked), "")


def _trivia(path: pathlib.Path) -> Iterator[Entry]:
  for block in _read_text(path).split("#Q ")[1:]:
    asked = _SPACE.sub(" ", block.split("\n^")[0]).strip()
    if asked.endswith("?"):
      yield Entry("question", asked, "")


def _asked_json(path: pathlib.Path) -> Iterator[Entry]:
  for row in json.loads(_read_text(path)):
    yield Entry("question", row["qText"], "")


def _meaning(path: pathlib.Path) -> Iterator[Entry]:
  """WordNet's data.noun: what words mean; of every fourth, asked by rule."""
  lines = [line for line in _read_text(path).splitlines() if " | " in line]
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


# Sources that the manifest names: each is fetched once by the client of its home.

_SKIPPED = re.compile(
  r"(^|[/_])(tests?|testing|_vendor|vendored|third_party|releases?|whatsnew"
  r"|changelog|changes|news|history|node_modules|zh|ja|fr|de|es|pt|ru|ko|it)"
  r"([/_.]|$)",
  re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A source of text: its home, version, licence and files."""

  name: str
  """"github:OWNER/NAME", "sdist:NAME" and "wheel:NAME" (of the package index),
  "debian:NAME", or "folder:PATH" for text of one's own."""
  version: str
  """A commit, or a version; not used for a folder."""
  licence: str
  """SPDX names where there are any."""
  files: tuple[tuple[str, str], ...]
  """(glob, reader): which files, and a key of `READERS`."""

  def __post_init__(self):
    kind = self.name.partition(":")[0]
    if kind not in ("github", "sdist", "wheel", "debian", "folder"):
      raise ValueError(
        "Source.name must start with github:, sdist:, wheel:, debian: or"
        f" folder:, got {self.name!r}"
      )
    for _, reader in self.files:
      if reader not in READERS:
        raise ValueError(
          f"{self.name}: expected a reader among"
          f" {sorted(READERS)}, got {reader!r}"
        )


def read_manifest(path: str | os.PathLike) -> list[Source]:
  """Reads the list of sources from a JSON file."""
  rows = json.loads(pathlib.Path(path).read_text())
  return [
    Source(**row | {"files": tuple(map(tuple, row["files"]))}) for row in rows
  ]


def read_entries(source: Source, store: str | os.PathLike) -> Iterator[Entry]:
  """Yields what a source's files hold, in the order of their names.

  Left out are translations, tests, lists of changes, and files that a reader
  cannot take in.

  Args:
    source: what to read.
    store: the folder for what was fetched.

  Raises:
    ValueError: if the source cannot be fetched.
  """
  root, seen = fetch(source, store), set()
  for pattern, reader in source.files:
    for path in sorted(root.glob(pattern)):
      inside = path.relative_to(root).as_posix()
      if path in seen or not path.is_file() or _SKIPPED.search(inside):
        continue
      seen.add(path)
      try:
        yield from READERS[reader](path)
      except (AttributeError, LookupError, SyntaxError, ValueError):
        print(f"{source.name}: cannot read {inside}, left out")


def fetch(source: Source, store: str | os.PathLike) -> pathlib.Path:
  """Returns the folder that holds a source, which is fetched where it is not.

  Args:
    source: what to fetch.
    store: holds one folder for each source and version.

  Raises:
    ValueError: with what the client said, if it fails.
  """
  kind, _, name = source.name.partition(":")
  if kind == "folder":
    return pathlib.Path(name)
  place = f"{kind}+{name.replace('/', '+')}+{source.version}"
  target = pathlib.Path(store) / re.sub(r"[^\w.+-]", "_", place)
  if not target.exists():
    with artifacts.new_folder(target, "text source") as folder:
      {
        "github": _clone, "sdist": _download, "wheel": _download,
        "debian": _unpack_debian,
      }[kind](kind, name, source.version, folder)  # fmt: skip
  return target


def _run_client(*command: str, folder: pathlib.Path) -> None:
  result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
  if result.returncode:
    line = (result.stderr.strip() or "nothing").splitlines()[-1]
    raise ValueError(f"{' '.join(command[:3])}... failed: {line}")


def _clone(kind, name, version, folder) -> None:
  del kind
  _run_client("git", "init", "-q", folder=folder)
  url = f"https://github.com/{name}"
  _run_client("git", "fetch", "-q", "--depth=1", url, version, folder=folder)
  _run_client("git", "checkout", "-q", "FETCH_HEAD", folder=folder)
  shutil.rmtree(folder / ".git")


def _download(kind, name, version, folder) -> None:
  form = ("--no-binary" if kind == "sdist" else "--only-binary", ":all:")
  _run_client(
    sys.executable, "-m", "pip", "download", "-q", "--no-deps",
    "--no-build-isolation", *form, f"{name}=={version}", folder=folder,
  )  # fmt: skip
  archive = _only_file(folder)
  if kind == "sdist":
    with tarfile.open(archive) as packed:
      packed.extractall(folder, filter="data")
  else:
    with zipfile.ZipFile(archive) as packed:
      packed.extractall(folder)
  archive.unlink()


def _only_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the downloaded file, which lies beside a lock file."""
  [archive] = (x for x in folder.iterdir() if not x.name.startswith("."))
  return archive


def _unpack_debian(kind, name, version, folder) -> None:
  del kind
  _run_client("apt-get", "download", "-q", f"{name}={version}", folder=folder)
  archive = _only_file(folder)
  _run_client("dpkg-deb", "-x", archive.name, ".", folder=folder)
  archive.unlink()


# Tasks of an input and a target, from one cache of tokens.

PREFIXES = {
  "copy": "copy: ",
  "fill": "fill: ",
  "heading": "title: ",
  "question": "generate_query: ",
  "rule": "generate_query: ",
  "summary": "generate_query: ",
}
"""Prefix of the input of each task."""

KINDS = ("", "heading", "question", "rule", "summary")
"""Kinds of queries; a passage that has none is of the first kind."""

_PASSAGE, _QUERY = 80, 24  # tokens that are kept
_NOISE_DENSITY = 0.15
_MEAN_SPAN = 3

SHORTEST_FILL = 1 + _MEAN_SPAN + 1
"""Tokens of a target with one gap: its sentinel, what stood there, EOS."""


@dataclasses.dataclass(frozen=True)
class Record:
  """A passage, and a query about it."""

  kind: str
  """One of `KINDS`."""
  query: str
  """Empty where the kind is."""
  passage: str
  """The text that the query is about."""


@dataclasses.dataclass(frozen=True)
class Cache:
  """Records as ids, and the ids that the tasks add: two bytes a token."""

  passages: np.ndarray  # uint16 [record, token]
  queries: np.ndarray  # uint16 [record, token]
  kinds: np.ndarray  # uint8 [record], a position in KINDS
  prefixes: np.ndarray  # uint16 [task, token], tasks in the order of PREFIXES
  sentinels: np.ndarray  # uint16, ids that stand for gaps

  def save(self, path: str | os.PathLike) -> None:
    """Writes the cache as a compressed .npz file."""
    arrays = dataclasses.asdict(self)
    with artifacts.replacing(path) as stream:
      np.savez_compressed(stream, **arrays)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Cache":
    """Reads what `save` wrote."""
    return cls(**array_files.read_npz(path))


def tokenize(
  vocabulary: vocabulary_lib.SentencePiece, records: Iterable[Record]
) -> Cache:
  """Tokenizes records once, for all tasks and lengths.

  Args:
    vocabulary: of at most 65,536 ids.
    records: what to keep; a query that is longer than a cache keeps is left
      out with its record, a passage is cut.

  Returns:
    The cache, in the order of the records.
  """
  passages, queries, kinds = [], [], []
  for record in records:
    query = vocabulary.encode(record.query) if record.query else []
    if len(query) < _QUERY:
      passages.append(vocabulary.encode(record.passage)[:_PASSAGE])
      queries.append(query)
      kinds.append(KINDS.index(record.kind))
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  prefixes = [vocabulary.encode(prefix) for prefix in PREFIXES.values()]
  return Cache(
    passages=vocabulary_lib.pad(passages, _PASSAGE).astype(np.uint16),
    queries=vocabulary_lib.pad(queries, _QUERY).astype(np.uint16),
    kinds=np.array(kinds, np.uint8),
    prefixes=vocabulary_lib.pad(prefixes, max(map(len, prefixes))).astype(
      np.uint16
    ),
    sentinels=np.arange(
      vocabulary.vocab_size - 1, first_extra - 1, -1, dtype=np.uint16
    ),
  )


def find_rows(cache: Cache, task: str, target_length: int) -> np.ndarray:
  """Finds the records that have an example of a task, int64."""
  if task in ("copy", "fill"):
    return np.flatnonzero(cache.passages[:, 16] > 0)
  lengths = np.count_nonzero(cache.queries, axis=1)
  fits = (lengths > 0) & (lengths < target_length)
  return np.flatnonzero(fits & (cache.kinds == KINDS.index(task)))


def make_examples(
  cache: Cache,
  task: str,
  rows: np.ndarray,
  *,
  input_length: int,
  target_length: int,
  rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """Makes one example of a task from each of some records.

  Args:
    cache: from `tokenize`.
    task: a key of `PREFIXES`.
    rows: positions of the records, from `find_rows`.
    input_length: columns of the input, prefix and EOS included.
    target_length: columns of the target, EOS included; for "fill" at least
      `SHORTEST_FILL`, and the cache has sentinels.
    rng: draws windows and gaps.

  Returns:
    The inputs and the targets, int32, padded with 0.
  """
  prefix = cache.prefixes[list(PREFIXES).index(task)]
  head = prefix[prefix > 0].astype(np.int32)
  room = input_length - len(head) - 1
  body = cache.passages[rows].astype(np.int32)
  if task in ("copy", "fill"):
    body = _window(body, room, rng)
  if task == "copy":
    target = _window(body, target_length - 1, rng)
  elif task == "fill":
    body, target = _fill(body, target_length - 1, cache.sentinels, rng)
  else:
    target = cache.queries[rows].astype(np.int32)
  before = np.broadcast_to(head, (len(rows), len(head)))
  inputs = np.concatenate([before, _ended(body, room + 1)], axis=1)
  return inputs, _ended(target, target_length)


def _window(ids: np.ndarray, length: int, rng) -> np.ndarray:
  """Returns up to `length` ids in a row of each row, from a place drawn."""
  lengths = np.count_nonzero(ids, axis=1)
  starts = rng.integers(0, np.maximum(1, lengths - length + 1))
  places = starts[:, None] + np.arange(min(length, ids.shape[1]))
  wide = np.pad(ids, ((0, 0), (0, places.shape[1])))
  return np.take_along_axis(wide, places, axis=1)


def _ended(ids: np.ndarray, length: int) -> np.ndarray:
  """Returns the ids with EOS behind them, cut and padded to `length`."""
  body = ids[:, : length - 1]
  padded = np.pad(body, ((0, 0), (0, length - body.shape[1])))
  ends = np.count_nonzero(body, axis=1)
  padded[np.arange(len(padded)), ends] = vocabulary_lib.EOS_ID
  return padded


def _fill(ids: np.ndarray, length: int, sentinels: np.ndarray, rng):
  """Takes spans out of each row of ids; returns what is left, and the spans."""
  lengths = np.count_nonzero(ids, axis=1)
  most = max(1, min(length // (_MEAN_SPAN + 1), len(sentinels)))
  wanted = np.rint(lengths * _NOISE_DENSITY / _MEAN_SPAN).astype(int)
  spans = np.clip(wanted, 1, most)
  stride = lengths // spans
  number = np.arange(most)
  starts = number * stride[:, None] + rng.integers(
    0, np.maximum(1, stride - _MEAN_SPAN)[:, None], (len(ids), most)
  )
  inside = starts[:, :, None] + np.arange(_MEAN_SPAN)  # [row, span, token]
  is_span = (number < spans[:, None])[:, :, None]
  is_there = is_span & (inside < lengths[:, None, None])
  wide = np.pad(ids, ((0, 0), (0, 1)))  # one column for what is not there
  places = np.where(is_there, inside, ids.shape[1]).reshape(len(ids), -1)
  hidden = np.take_along_axis(wide, places, axis=1).reshape(inside.shape)
  marks = np.where(is_span, sentinels[:most, None].astype(np.int32), 0)
  left = np.concatenate([marks, np.zeros_like(hidden[:, :, 1:])], axis=2)
  np.put_along_axis(wide, places, left.reshape(places.shape), axis=1)
  target = np.concatenate([marks, hidden], axis=2).reshape(len(ids), -1)
  return _without_gaps(wide[:, :-1]), _without_gaps(target)


def _without_gaps(ids: np.ndarray) -> np.ndarray:
  """Moves the ids of each row before its zeros, in their order."""
  order = np.argsort(ids == 0, axis=1, kind="stable")
  return np.take_along_axis(ids, order, axis=1)


# Records: passages and their queries, without what is held out.

_SIGNATURE = re.compile(r"\w\(.*\)|->|::|[={}\\]|^\W")
_LATIN = re.compile(r"^[\x00-\x7f\u00e0-\u00ff\u2010-\u2026]*$")
_SHORT, _PASSAGE_WORDS = 40, 30
_WORDS = {  # of a title, from and to
  "heading": (1, 12),
  "question": (3, 25),
  "rule": (3, 25),
  "summary": (3, 30),
}
_NGRAM = 8


class HeldOut:
  """Finds text that repeats held-out queries.

  A text repeats a query where any 8 consecutive words of it, lower-cased, stand
  in the text; of a query of 3 to 8 words, all of them. One or two words are
  nobody's secret and do not count.
  """

  def __init__(self, queries: Iterable[str]):
    self._grams = {gram for query in queries for gram in get_grams(query)}
    self._lengths: dict[str, set[int]] = {}  # by the first word
    for gram in self._grams:
      self._lengths.setdefault(gram[0], set()).add(len(gram))

  def flags(self, texts: Sequence[Sequence[str]]) -> list[list[bool]]:
    """Tells which sentences of each text take part in a repetition.

    Args:
      texts: each a sequence of sentences; what is repeated may go over the
        ends of sentences, not over those of texts.

    Returns:
      For each text one flag for each sentence.
    """
    return [self._flagged(text) for text in texts]

  def _flagged(self, text: Sequence[str]) -> list[bool]:
    words, owners = [], []
    for number, sentence in enumerate(text):
      own = docstrings.words(sentence)
      words += own
      owners += [number] * len(own)
    flags = [False] * len(text)
    for start, word in enumerate(words):
      for length in self._lengths.get(word, ()):
        if tuple(words[start : start + length]) in self._grams:
          for owner in owners[start : start + length]:
            flags[owner] = True
    return flags


def get_grams(query: str) -> list[tuple[str, ...]]:
  """Returns the 8-grams of a query, or the whole of a shorter one.

  >>> get_grams("one two three")
  [('one', 'two', 'three')]
  >>> len(get_grams("a b c d e f g h i"))
  2
  """
  words = tuple(docstrings.words(query))
  if len(words) < 3:
    return []
  if len(words) <= _NGRAM:
    return [words]
  return [words[i : i + _NGRAM] for i in range(len(words) - _NGRAM + 1)]


def make_records(
  entries: Iterable[Entry],
  held_out: HeldOut,
  seen: set[str],
  dropped: collections.Counter,
  *,
  max_words: int = 90,
) -> Iterator[Record]:
  """Makes records of entries: passages and their queries.

  Args:
    entries: of one source.
    held_out: what must not come through.
    seen: sentences of earlier sources, which are left out; grows.
    dropped: counts titles, sentences and records that repeat what is held out.
    max_words: length at which a passage is closed.

  Yields:
    The records, in the order of the entries; none of them repeats anything
    that is held out.
  """
  entries = list(entries)
  split = [[e.title, *sentences.split(e.text)] for e in entries]
  drafts = []
  flags = held_out.flags(split)
  for entry, parts, flagged in zip(entries, split, flags, strict=True):
    dropped["titles"] += flagged[0]
    dropped["sentences"] += sum(flagged[1:])
    clean = []
    for sentence, is_flagged in zip(parts[1:], flagged[1:], strict=True):
      if is_flagged or not _is_english(sentence):
        continue
      if entry.kind != "question" and len(sentence) > _SHORT:
        if sentence in seen:
          continue
        seen.add(sentence)
      clean.append(sentence.strip())
    title = entry.title if _is_title(entry) and not flagged[0] else ""
    drafts += _pair(entry.kind, title, cut_passages(clean, max_words))
  flags = held_out.flags([[d.query, "", d.passage] for d in drafts])
  for record, flagged in zip(drafts, flags, strict=True):
    dropped["records"] += any(flagged)  # across two sentences, or by a rule
    if not any(flagged):
      yield record


def _pair(kind, title, passages) -> Iterator[Record]:
  """Pairs passages with the title above the first, and with questions."""
  for number, passage in enumerate(passages):
    text = " ".join(passage)
    if title and number == 0:
      yield Record(kind, title, text)
    elif sum(len(s.split()) for s in passage) >= _PASSAGE_WORDS:
      yield Record("", "", text)
    if kind == "heading":
      for query in _asked(title if number == 0 else "", passage):
        yield Record("rule", query, text)


def _asked(title: str, passage: Sequence[str]) -> list[str]:
  """Returns two questions by rule: of the title, and drawn from all sentences.

  The draw depends on the questions alone, so that forms are mixed.
  """
  first = ask(title, passage[0])
  others = {q for s in passage[1:] for q in ask("", s)}
  drawn = sorted({*first[1:], *others}, key=lambda q: zlib.crc32(q.encode()))
  return (first[:1] + drawn)[:2]


def _is_title(entry: Entry) -> bool:
  fewest, most = _WORDS[entry.kind]
  fits = fewest <= len(entry.title.split()) <= most and len(entry.title) > 3
  if entry.kind == "summary" and _SIGNATURE.search(entry.title):
    return False
  return fits and _is_english(entry.title)


def _is_english(text: str) -> bool:
  letters = sum(c.isalpha() or c == " " for c in text)
  return (
    len(text) >= 3 and letters >= 0.8 * len(text) and bool(_LATIN.match(text))
  )


def count_repeats(queries: Iterable[str], records: Iterable[Record]) -> int:
  """Counts the records that repeat a query: the promise is that none does."""
  held_out = HeldOut(queries)
  flags = held_out.flags([[r.query, "", r.passage] for r in records])
  return sum(map(any, flags))


def cut_passages(
  sentences: Iterable[str], max_words: int
) -> list[tuple[str, ...]]:
  """Joins consecutive sentences into passages of about `max_words` words.

  >>> cut_passages(["one two", "three", "four five six"], 3)
  [('one two', 'three'), ('four five six',)]
  """
  done, current, length = [], [], 0
  for sentence in sentences:
    words = sentence.split()[:max_words]
    if current and length + len(words) > max_words:
      done.append(tuple(current))
      current, length = [], 0
    current.append(" ".join(words))
    length += len(words)
  if current:
    done.append(tuple(current))
  return [
    p for p in done if sum(len(s.split()) for s in p) >= min(8, max_words)
  ]


# An initialization from which a small T5 can copy its input at once.

_PREVIOUS_BUCKET = 1  # relative position -1 when both directions have buckets
_PREVIOUS_BIAS = 6.0
_SHARPNESS = 1.5


def add_copy_circuit(params, config: t5_config.T5Config, key: jax.Array):
  """Returns parameters whose attention kernels hold the copy circuit.

  Args:
    params: fresh parameters of `t5.Transformer(config)`.
    config: with num_heads * head_dim == emb_dim and tied logits, without which
      what is handed over would not be read as a token.
    key: draws the rotations.

  Returns:
    The same tree with new values in the first layers' attention.

  Raises:
    ValueError: if the shape has no room for the circuit.
  """
  dim, width = config.emb_dim, config.num_heads * config.head_dim
  if width != dim or not config.logits_via_embedding or config.num_heads < 2:
    raise ValueError(
      "the copy circuit needs num_heads * head_dim == emb_dim, two heads and"
      f" logits_via_embedding, got {width}, emb_dim={dim},"
      f" num_heads={config.num_heads},"
      f" logits_via_embedding={config.logits_via_embedding}"
    )
  match, carry, hand_over = (
    jnp.linalg.qr(jax.random.normal(k, (dim, dim)))[0]
    for k in jax.random.split(key, 3)
  )
  heads = config.num_heads // 2
  ours = jnp.arange(dim) < heads * config.head_dim  # columns of our heads
  params = jax.tree.map(lambda leaf: leaf, params)  # a copy of the dicts
  bias = params["encoder"]["relpos_bias"]
  bias["rel_embedding"] = (
    bias["rel_embedding"].at[:heads, _PREVIOUS_BUCKET].add(_PREVIOUS_BIAS)
  )
  first = params["encoder"]["layers_0"]["attention"]
  _put(first, "value", ours[None, :], match)
  _put(first, "out", ours[:, None], carry.T)
  cross = params["decoder"]["layers_0"]["encoder_decoder_attention"]
  _put(cross, "query", ours[None, :], _SHARPNESS * match)
  _put(cross, "key", ours[None, :], carry)
  everywhere = jnp.ones((1, 1), bool)
  _put(cross, "value", everywhere, hand_over)
  _put(cross, "out", everywhere, hand_over.T)
  return params


def _put(attention, name: str, where: jax.Array, value: jax.Array) -> None:
  """Writes `value` into a kernel where the mask says so."""
  old = attention[name]["kernel"]
  where = jnp.broadcast_to(where, old.shape)
  attention[name]["kernel"] = jnp.where(where, value, old)


# The curriculum.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """A part of the curriculum: short inputs first, longer ones later."""

  steps: int
  """Optimizer steps."""
  input_length: int
  """Tokens of the input, prefix and EOS included."""
  target_length: int
  """Tokens of the target, EOS included."""
  tasks: tuple[str, ...]
  """Keys of `PREFIXES`, the pairs of the contrastive loss first."""
  batch_sizes: tuple[int, ...]
  """Examples of each task in a batch."""
  rates: tuple[float, float]
  """Factor of the learning rates at the start and at the end, linear between.

  High rates undo the copying that short inputs taught: they fall before the
  inputs grow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Everything that decides the checkpoint."""

  phases: tuple[Phase, ...]
  """The curriculum."""
  model: t5_config.T5Config
  """Shape; vocab_size counts pieces and sentinels together."""
  most: tuple[tuple[str, int], ...]
  """Most records of a kind; a larger kind is sampled."""
  half_precision: bool = False
  """Whether params.safetensors is float16; it is read as float32."""
  extra_ids: int = shipped.EXTRA_IDS
  """Sentinels for span corruption."""
  learning_rate: float = 0.02
  """Muon's, for the kernels."""
  other_learning_rate: float = 0.004
  """Adam's, for the embedding, biases and scales."""
  warmup_steps: int = 50
  """Linear warm-up at the start of the first phase."""
  contrastive_weight: float = 0.2
  """Weight of the in-batch softmax over targets and their inputs."""
  temperature: float = 0.05
  """Temperature of that softmax."""
  manifest: str = str(MANIFEST)
  """JSON list of sources, for `read_manifest`."""
  store: str | None = None
  """Folder for fetched sources; None: `sources` in the working directory."""
  held_out: tuple[str, ...] = ()
  """BEIR folders whose queries, and questions in documents, are held out; or
  files with a query in the last column of each line. The demo set's queries
  always are."""
  seed: int = 0
  """Seed of the samples of records, of the initialization and of batches."""
  settings: loop.Settings = field_kinds.speed_only(
    make=lambda: loop.Settings(save_seconds=120.0, log_every=25)
  )
  """Saving and reporting."""


def make_phases(
  steps: tuple[int, int, int], batch_sizes: Sequence[tuple[int, ...]]
) -> tuple[Phase, ...]:
  """Makes the three phases, which differ in steps and batches alone."""
  shapes = (
    (32, 16, (1.0, 0.35), "rule heading fill copy"),
    (64, 18, (0.35, 0.1), "question summary rule heading fill copy"),
    (64, 24, (0.1, 0.0), "question summary rule heading fill"),
  )
  return tuple(
    Phase(
      steps=number,
      input_length=length,
      target_length=target,
      tasks=tuple(names.split()),
      batch_sizes=sizes,
      rates=rates,
    )
    for number, sizes, (length, target, rates, names) in zip(
      steps, batch_sizes, shapes, strict=True
    )
  )


_SMALL_BATCHES = (
  (16, 16, 32, 64),
  (28, 20, 8, 20, 26, 6),
  (32, 22, 6, 18, 18),
)
_SMALL_MOST = (("", 90_000), ("heading", 70_000))
SCHEDULES = {
  "shipped": {
    "model": SHAPE,
    "phases": make_phases(
      (600, 11_500, 3_000),
      (
        (64, 64, 128, 256),
        (64, 128, 208, 216, 344, 64),
        (160, 160, 168, 200, 336),
      ),
    ),
    "most": (
      *(("", 200_000), ("heading", 130_000)),
      *(("rule", 110_000), ("summary", 60_000)),
    ),
    "half_precision": True,
  },
  "two_cores": {
    "model": t5_config.get("demo"),
    "phases": make_phases((300, 6_000, 1_500), _SMALL_BATCHES),
    "most": _SMALL_MOST,
  },
  "short": {
    "model": t5_config.get("demo"),
    "phases": make_phases((150, 600, 150), _SMALL_BATCHES),
    "most": _SMALL_MOST,
  },
}
"""Settings of the shipped checkpoint; of hours, and of minutes, on two cores."""


def make_params(shape: t5_config.T5Config, seed: int):
  """Returns new parameters, with the copy circuit where it fits."""
  params = t5.init_params(shape, jax.random.key(seed))
  width = shape.num_heads * shape.head_dim
  if not shape.logits_via_embedding or width != shape.emb_dim:
    return params
  return add_copy_circuit(params, shape, jax.random.key(seed + 1))


def find_examples(cache: Cache, phase: Phase) -> list[np.ndarray]:
  """Returns the records that have an example of each task of a phase."""
  examples = []
  for task in phase.tasks:
    rows = find_rows(cache, task, phase.target_length)
    if not len(rows):
      raise ValueError(
        f"no public passage is long enough for task {task!r}: give more"
        " public text or take the task out of the phase"
      )
    examples.append(rows)
  return examples


def make_optimizer(config: Config, params: Any) -> optax.GradientTransformation:
  """Makes Muon for the kernels, Adam for everything else (Jordan et al. 2024)."""

  def schedule(peak):
    return optax.join_schedules(
      [
        optax.linear_schedule(
          peak * phase.rates[0], peak * phase.rates[1], phase.steps
        )
        for phase in config.phases
      ],
      np.cumsum([phase.steps for phase in config.phases])[:-1].tolist(),
    )

  def warmed_up(peak):
    later = schedule(peak)
    return lambda step: (
      later(step) * jnp.minimum(1.0, (step + 1) / config.warmup_steps)
    )

  def dimensions(path, leaf):
    del leaf
    is_kernel = path[-1].key == "kernel"
    return optax.contrib.MuonDimensionNumbers() if is_kernel else None

  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.contrib.muon(
      warmed_up(config.learning_rate),
      adam_learning_rate=warmed_up(config.other_learning_rate),
      muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(
        dimensions, params
      ),
    ),
  )


def loss_fn(params, batch, key=None, *, config: Config, num_pairs: int):
  """Computes the cross-entropy of all tasks, and a softmax over the pairs.

  A key draws the dropout of the cross-entropy; without one there is none.
  """
  model = t5.Transformer(config.model)
  inputs, targets = batch["inputs"], batch["targets"]
  logits = model.apply(
    {"params": params},
    inputs,
    t5.shift_right(targets),
    enable_dropout=key is not None,
    rngs=None if key is None else {"dropout": key},
  )
  cross_entropy = seq2seq.cross_entropy(logits, targets)
  metrics = {"loss": jnp.mean(cross_entropy)}
  if num_pairs:
    encode = functools.partial(dual_encoder.encode, params, config.model)
    queries = encode(targets[:num_pairs])
    documents = encode(inputs[:num_pairs])
    pairs = contrastive.softmax(
      queries @ documents.T, temperature=config.temperature
    )
    metrics["contrastive"] = jnp.mean(pairs)
  total = metrics["loss"] + config.contrastive_weight * metrics.get(
    "contrastive", 0.0
  )
  return total, metrics


def train(
  config: Config,
  params: Any,
  data: Cache,
  *,
  directory: pathlib.Path,
  metrics_path: pathlib.Path,
) -> tuple[Any, float]:
  """Trains through the curriculum; resumes from `directory`.

  Args:
    config: curriculum, shape and optimizer.
    params: initial parameters.
    data: tokenized public records.
    directory: for the states of unfinished training.
    metrics_path: metrics.jsonl.

  Returns:
    The trained parameters and the seconds this call took.
  """
  start = time.monotonic()
  tx = make_optimizer(config, params)
  state = (params, tx.init(params))
  get_key = _make_keys(config)
  done = 0
  for phase in config.phases:
    rows = find_examples(data, phase)
    step_fn = functools.partial(
      _step, tx=tx, config=config, num_pairs=_count_pairs(phase)
    )
    compiled = jax.jit(step_fn, donate_argnums=(0,))
    done += phase.steps
    state = loop.train(
      lambda state, batch, step, run=compiled: run(state, batch, get_key(step)),
      state,
      functools.partial(_make_batch, data, phase, rows, config.seed),
      loop.Files(
        directory=directory,
        metrics_path=metrics_path,
        description=f"pretrain {phase.input_length}/{phase.target_length}",
      ),
      steps=done,
      examples_per_step=sum(phase.batch_sizes),
      settings=config.settings,
    )
  return state[0], time.monotonic() - start


def _count_pairs(phase: Phase) -> int:
  """Counts the leading examples whose target is a query about their input."""
  count = 0
  for task, size in zip(phase.tasks, phase.batch_sizes, strict=True):
    if task in ("copy", "fill"):
      break
    count += size
  return count


def _make_keys(config: Config):
  """Returns the function from a step to its key of dropout, or to None."""
  if not config.model.dropout_rate:
    return lambda step: None
  key = jax.random.key(config.seed)
  return lambda step: jax.random.fold_in(key, step)


def _step(state, batch, key, *, tx, config, num_pairs):
  params, opt_state = state
  grads, metrics = jax.grad(
    functools.partial(loss_fn, config=config, num_pairs=num_pairs),
    has_aux=True,
  )(params, batch, key)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), metrics


def _make_batch(
  cache: Cache, phase: Phase, rows: Sequence[np.ndarray], seed: int, step: int
) -> dict[str, np.ndarray]:
  """Draws a batch that depends on (seed, step) alone."""
  rng = np.random.default_rng([seed, step])
  parts = [
    make_examples(
      cache,
      task,
      rng.choice(records, size),
      input_length=phase.input_length,
      target_length=phase.target_length,
      rng=rng,
    )
    for task, records, size in zip(
      phase.tasks, rows, phase.batch_sizes, strict=True
    )
  ]
  inputs, targets = map(np.concatenate, zip(*parts, strict=True))
  return {"inputs": inputs, "targets": targets}


# The checkpoint.

CACHE_NAME = "tokens.npz"
CORPUS_NAME = "corpus.jsonl.gz"
_MOST_REPEATED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
  """Provenance of a public checkpoint: result.json."""

  directory: str
  """Folder of params.safetensors, config.json and vocabulary.model."""
  sources: tuple[str, ...]
  """Name, version, licence and words of every source."""
  demo_set: str
  """Versions of the demo set that was held out."""
  num_records: dict[str, int]
  """Records of each kind; "" counts passages nobody wrote anything about."""
  num_words: int
  """Words of text."""
  text_digest: str
  """SHA-256 of all records, in order."""
  dropped: dict[str, int]
  """Sentences, titles and records that repeated held-out queries."""
  num_held_out: dict[str, int]
  """Queries held out, by set."""
  num_repeated: int
  """Records that repeat a held-out query after all: 0."""
  num_parameters: int
  """Trained parameters."""
  seconds: float
  """Training time of the last call."""


def run(config: Config, workdir: str | os.PathLike) -> Pretrained:
  """Reads the text, trains vocabulary and model; resumes where it stopped.

  Args:
    config: what to read and to train.
    workdir: gets params.safetensors, config.json, vocabulary.model, tokens.npz,
      corpus.jsonl.gz, metrics.jsonl and result.json. Where it holds tokens.npz,
      text/ and vocabulary.model of an earlier call, no text is read.

  Returns:
    The provenance of the checkpoint.

  Raises:
    ValueError: if another run is in the working directory, a source cannot be
      fetched, or the text repeats a held-out query.
  """
  with workspace.locked(workdir):
    return _run(config, pathlib.Path(workdir))


def _run(config: Config, root: pathlib.Path) -> Pretrained:
  if not (root / CACHE_NAME).exists():
    _read(config, root)
  text = artifacts.load(root / "text", Pretrained)
  digest = artifacts.fingerprint("shipped_t5", config, text.text_digest)
  if (finished := artifacts.find(root, Pretrained, digest)) is not None:
    print("[pretrain] finished earlier, skipped", flush=True)
    return finished
  params, seconds = train(
    config,
    make_params(config.model, config.seed),
    Cache.load(root / CACHE_NAME),
    directory=root / "state" / digest,
    metrics_path=root / "metrics.jsonl",
  )
  if config.half_precision:
    params = jax.tree.map(lambda leaf: leaf.astype(np.float16), params)
  shape = dataclasses.replace(config.model, dropout_rate=0.0, dtype="float32")
  t5_checkpoints.save(root, params, shape)
  result = dataclasses.replace(
    text,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    seconds=seconds,
  )
  artifacts.save(root, result, digest)
  return result


def _get_held_out(config: Config) -> dict[str, list[str]]:
  """Returns the queries that must not be in the text, by set."""
  queries = {"demo": environment_docs.private_queries()}
  for path in map(pathlib.Path, config.held_out):
    queries[path.name] = _read_queries(path)
  return queries


def _read_queries(path: pathlib.Path) -> list[str]:
  """Returns the queries of a set and the questions in its documents."""
  if path.is_file():
    return [line.split("\t")[-1] for line in path.read_text().splitlines()]
  collection = beir.read_beir(path)
  asked = [
    sentence
    for document in collection.documents
    for sentence in sentences.split(document.text)
    if sentence.endswith("?")
  ]
  return [query.text for query in collection.queries] + asked


def _read(config: Config, root: pathlib.Path) -> None:
  """Fetches and reads the text; writes vocabulary, cache and account."""
  begun = time.monotonic()
  held_out = _get_held_out(config)
  queries = [query for part in held_out.values() for query in part]
  dropped: collections.Counter = collections.Counter()
  names: list[str] = []
  read = _sample(config, list(_records(config, root, queries, dropped, names)))
  text = [f"{r.kind}\n{r.query}\n{r.passage}\n\n" for r in read]
  repeated = count_repeats(queries, read)
  if repeated:
    raise ValueError(f"{repeated} records repeat held-out queries: a defect")
  model = root / "vocabulary.model"
  vocabulary_lib.train(
    (line for r in read for line in (r.query, r.passage) if line),
    model,
    vocab_size=config.model.vocab_size - config.extra_ids,
  )
  vocabulary = vocabulary_lib.load(model, extra_ids=config.extra_ids)
  cache = tokenize(vocabulary, read)
  with gzip.open(root / CORPUS_NAME, "wt", encoding="utf-8") as stream:
    stream.writelines(f"{json.dumps({'text': one})}\n" for one in text)
  account = Pretrained(
    directory=root.name,
    sources=tuple(names),
    demo_set=environment_docs.digest(),
    num_records=dict(collections.Counter(r.kind for r in read)),
    num_words=sum(len(line.split()) for line in text),
    text_digest=hashlib.sha256("".join(text).encode()).hexdigest(),
    dropped=dict(dropped),
    num_held_out={name: len(part) for name, part in held_out.items()},
    num_repeated=repeated,
    num_parameters=0,
    seconds=time.monotonic() - begun,
  )
  artifacts.save(root / "text", account, account.text_digest)
  cache.save(root / CACHE_NAME)
  print(f"[pretrain] text and tokens: {account.seconds:.0f} s", flush=True)


def _records(config, root, queries, dropped, names) -> Iterator[Record]:
  """Yields the records of all sources."""
  held_out = HeldOut(queries)
  store = pathlib.Path(config.store or root / "sources")
  seen: set[str] = set()
  for source in read_manifest(config.manifest):
    entries, words = read_entries(source, store), 0
    for record in make_records(entries, held_out, seen, dropped):
      words += len(record.passage.split())
      yield record
    names.append(
      f"{source.name} {source.version} ({source.licence}): {words} words"
    )
    print(f"[pretrain] {names[-1]}", flush=True)


def _sample(config: Config, read: list[Record]) -> list[Record]:
  """Samples the kinds of which there are too many; mixes the order.

  A title that stands above many texts ("Remarks") tells none of them.
  """
  titles = collections.Counter(r.query for r in read if r.query)
  read = [r for r in read if titles[r.query] <= _MOST_REPEATED]
  rng = random.Random(config.seed)
  rng.shuffle(read)
  most, sampled = dict(config.most), []
  seen: collections.Counter = collections.Counter()
  for record in read:
    seen[record.kind] += 1
    if seen[record.kind] <= most.get(record.kind, math.inf):
      sampled.append(record)
  return sampled


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the script with command-line arguments."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--workdir", required=True, help="folder of the checkpoint")
  add(
    "--schedule",
    choices=SCHEDULES,
    default="shipped",
    help="two_cores: hours without an accelerator; short: minutes",
  )
  words = "another shape than that of the schedule"
  names = [name for name in t5_config.names() if name.startswith("demo")]
  add("--model", choices=names, help=words)
  words = "BEIR folders, or files of queries, that the text must not repeat"
  add("--held_out", nargs="*", default=(), metavar="PATH", help=words)
  add("--manifest", default=str(MANIFEST), help="JSON list of sources")
  add("--store", help="folder with fetched sources")
  add("--seed", type=int, default=0, help="of records, parameters and batches")
  options = vars(parser.parse_args(argv))
  workdir, model = options.pop("workdir"), options.pop("model")
  options["held_out"] = tuple(options["held_out"])
  if model:
    options["model"] = t5_config.get(model)
  schedule = SCHEDULES[options.pop("schedule")]
  try:
    run(Config(**schedule | options), workdir)
  except (OSError, ValueError) as error:
    sys.exit(f"make_checkpoint: {error}")


if __name__ == "__main__":
  main()
