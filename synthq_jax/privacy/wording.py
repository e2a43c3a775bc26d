"""Writes claims in English, from the sentences of sentences.toml.

A statement holds numbers, flags and names. They become sentences here and nowhere
else, by name and unit, and no code parses the sentences.
"""

import pathlib
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from synthq_jax.privacy import reasons, releases, rounding
from synthq_jax.privacy import unit as unit_lib

if TYPE_CHECKING:
  from synthq_jax.privacy import statement as statement_lib

__all__ = [
  "FIXED_SECRET", "SECTIONS", "bounds", "change", "for_two", "in_words",
  "is_known", "sentences", "summarize", "write", "write_release",
]  # fmt: skip

SECTIONS = {
  "public": "Treated as public",
  "assumptions": "Assumed",
  "not_protected": "Not protected",
  "notes": "How this result was made",
}
"""Titles of the statement fields that hold names or sentences."""
_WORDS: dict[str, dict[str, Any]] = tomllib.loads(
  pathlib.Path(__file__).with_name("sentences.toml").read_text("utf-8")
)
_NAMED = {k: v for section in SECTIONS for k, v in _WORDS[section].items()}
_NOUNS = {  # nouns for the private records and for the protected units
  "query": ("private queries", "queries"),
  "users": ("private queries", "users"),
  "example": ("private examples", "examples"),
  "pair of images": ("private pairs", "images"),
  "client": ("clients", "clients"),
}


def _fill(template: str, /, **values: Any) -> str:
  """Formats a text of sentences.toml with values, on one line."""
  return template.replace("\n", " ").format(**values)


FIXED_SECRET = _fill(_WORDS["claim"]["fixed_secret"])


def is_known(name: str) -> bool:
  """Checks that a text is a known name, or a sentence rather than a name."""
  return not name.isidentifier() or name in _NAMED


def write(name: str, unit: unit_lib.Unit) -> str:
  """Writes the sentence or mechanism of a name; returns other words unchanged.

  >>> write("number", unit_lib.user(4)), write("It rained.", unit_lib.QUERY)
  ('The number of users and private queries.', 'It rained.')

  Args:
    name: a name of sentences.toml, or your own words.
    unit: the unit of the claim.
  """
  template = _NAMED.get(name) or _WORDS["mechanisms"].get(name)
  if template is None:
    return name
  record = unit.whole.kind
  group = "users" if unit.is_user else record
  if isinstance(template, dict):
    template = template.get(group.replace(" ", "_"), template["other"])
  private, many = _NOUNS.get(group, ("private records", "records"))
  return _fill(
    template,
    record=record,
    private=private,
    many=many,
    users="users and " if unit.is_user else "",
    most=f"{unit.max_records:,}",
    are="is" if unit.max_records == 1 else "are",
  )


def sentences(
  statement: "statement_lib.PrivacyStatement", section: str
) -> tuple[str, ...]:
  """Writes the sentences of one section of a statement, in order.

  Args:
    statement: any statement.
    section: a key of `SECTIONS`.
  """
  unit, words = statement.unit, _WORDS["claim"]
  texts = [write(name, unit) for name in getattr(statement, section)]
  own = (unit, statement.relation)
  others = [pair for pair in statement.replaces if pair != own]
  if section == "assumptions":
    if any(part == unit.whole != unit for part, _ in others):
      texts.insert(0, _fill(words["emptied"], unit=unit, whole=unit.whole))
    if statement.secret_is_fixed:
      texts.insert(0, FIXED_SECRET)
  if section == "not_protected" and others:
    listed = ", ".join(f"one {part} ({relation})" for part, relation in others)
    texts.append(_fill(words["alone"], others=listed))
  return tuple(dict.fromkeys(texts))


def change(statement: "statement_lib.PrivacyStatement") -> str:
  """Writes the difference between two neighbouring data sets of the claim."""
  return _fill(_WORDS["relations"][statement.relation], unit=statement.unit)


def for_two(statement: "statement_lib.PrivacyStatement") -> str:
  """Writes the epsilon and delta of a statement for two records together.

  Args:
    statement: a statement with a ledger and a finite epsilon.
  """
  epsilon, delta = statement.for_two_records
  return _fill(
    _WORDS["claim"]["two" if delta < 1 else "no_two"],
    epsilon=rounding.epsilon(epsilon),
    delta=rounding.delta(delta),
  )


def in_words(statement: "statement_lib.PrivacyStatement") -> str:
  """Writes the claim in plain English, in paragraphs.

  Epsilon and delta are rounded up, so the text never claims more than the
  numbers.

  Args:
    statement: any statement.

  Returns:
    Paragraphs separated by empty lines, without markup.
  """
  parts = [
    ("Privacy", summarize(statement)),
    *(write_release(release, statement.unit) for release in statement.ledger),
    *bounds(statement),
  ]
  return "\n\n".join(f"{lead}. {text}" for lead, text in parts)


def bounds(
  statement: "statement_lib.PrivacyStatement",
) -> Iterator[tuple[str, str]]:
  """Yields titles and texts on several records of one person, and `SECTIONS`."""
  if statement.ledger and statement.is_finite:
    text = _WORDS["claim"]["several"]
    values = {"unit": statement.unit, "two": for_two(statement)}
    yield "Several records of one person", _fill(text, **values)
  for section, title in SECTIONS.items():
    if texts := sentences(statement, section):
      yield title, " ".join(texts)


def summarize(statement: "statement_lib.PrivacyStatement") -> str:
  """Writes the unit and the numbers of a claim in a few sentences."""
  kind = "finite" if statement.is_finite else "none"
  if statement.is_public:
    kind = "public_told" if statement.not_protected else "public"
  text = _fill(
    _WORDS["claim"][kind],
    unit=statement.unit,
    epsilon=rounding.epsilon(statement.epsilon),
    delta=rounding.delta(statement.delta),
    change=change(statement),
    relation=statement.relation,
    accountant=statement.accountant.upper(),
  )
  return text + _explain(statement) if kind == "none" else text


def _explain(statement: "statement_lib.PrivacyStatement") -> str:
  """Explains an infinite epsilon in spite of noise; returns "" without noise."""
  runs = [release.run() for release in statement.ledger]
  if not runs or any(run.noise_multiplier == 0 for run in runs):
    return ""
  reason = reasons.explain_infinite(
    runs, delta=statement.delta, relation=statement.relation
  )
  return f" The reason: {reason}." if reason else ""


def write_release(
  release: releases.Release, unit: unit_lib.Unit
) -> tuple[str, str]:
  """Writes the title and text of a ledger entry, for the unit of its claim."""
  words, size, bands = _WORDS["claim"], release.group_size, release.noise_bands
  mechanism = write(release.mechanism, unit)
  if release.mechanism in _WORDS["mechanisms"]:
    mechanism += ", Gaussian noise"
  text = _fill(
    words["release"],
    mechanism=mechanism,
    steps=release.steps,
    clip=f"{release.l2_clip_norm:g}",
    noise=rounding.noise(release.noise_multiplier, digits=6),
    sensitivity=f"{release.l2_sensitivity:g}",
    bands=_fill(words["bands"], bands=bands) if bands > 1 else "",
    drawn=_fill(_WORDS["sampling"][release.sampling], **vars(release)),
  )
  if size > 1:
    is_whole = release.expected_batch_size == release.num_examples
    moved = _fill(words["whole" if is_whole else "mixture"], size=size)
    text += _fill(words["group"], size=size, moved=moved)
  if release.part:
    text += _fill(words["part"], part=release.part)
  return f"Mechanism ({release.identifier})", text
