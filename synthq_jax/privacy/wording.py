"""Writes claims in English: fills in sentences.toml, which has all of them.

A statement holds numbers, flags and names. This is the one place where they become
sentences, by name and unit, and nothing reads these back.
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
"""The fields of a statement that hold names, and their titles."""
_WORDS: dict[str, dict[str, Any]] = tomllib.loads(
  pathlib.Path(__file__).with_name("sentences.toml").read_text("utf-8")
)
_NAMED = {k: v for section in SECTIONS for k, v in _WORDS[section].items()}
_NOUNS = {  # private records, and many of those that are protected
  "query": ("private queries", "queries"),
  "users": ("private queries", "users"),
  "example": ("private examples", "examples"),
  "pair of images": ("private pairs", "images"),
  "client": ("clients", "clients"),
}


def _fill(template: str, /, **values: Any) -> str:
  """Returns a text of sentences.toml on one line, its values filled in."""
  return template.replace("\n", " ").format(**values)


FIXED_SECRET = _fill(_WORDS["claim"]["fixed_secret"])


def is_known(name: str) -> bool:
  """Says whether a sentence is one of a user's own words, or a known name."""
  return not name.isidentifier() or name in _NAMED


def write(name: str, unit: unit_lib.Unit) -> str:
  """Returns the sentence or the mechanism of a name; other words as they are.

  >>> write("number", unit_lib.user(4)), write("It rained.", unit_lib.QUERY)
  ('The number of users and private queries.', 'It rained.')

  Args:
    name: of sentences.toml, or words of a user's own.
    unit: of the claim.
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
  """Returns the sentences of one of `SECTIONS`, in order.

  Args:
    statement: any statement.
    section: of `SECTIONS`.
  """
  unit, words = statement.unit, _WORDS["claim"]
  found = [write(name, unit) for name in getattr(statement, section)]
  own = (unit, statement.relation)
  others = [pair for pair in statement.replaces if pair != own]
  if section == "assumptions":
    if any(part == unit.whole != unit for part, _ in others):
      found.insert(0, _fill(words["emptied"], unit=unit, whole=unit.whole))
    if statement.secret_is_fixed:
      found.insert(0, FIXED_SECRET)
  if section == "not_protected" and others:
    listed = ", ".join(f"one {part} ({relation})" for part, relation in others)
    found.append(_fill(words["alone"], others=listed))
  return tuple(dict.fromkeys(found))


def change(statement: "statement_lib.PrivacyStatement") -> str:
  """Says what differs between two data sets that the claim is about."""
  return _fill(_WORDS["relations"][statement.relation], unit=statement.unit)


def for_two(statement: "statement_lib.PrivacyStatement") -> str:
  """Says what the releases of a statement promise for two records together.

  Args:
    statement: with a ledger and a finite epsilon.
  """
  epsilon, delta = statement.of_two
  return _fill(
    _WORDS["claim"]["two" if delta < 1 else "no_two"],
    epsilon=rounding.epsilon(epsilon),
    delta=rounding.delta(delta),
  )


def in_words(statement: "statement_lib.PrivacyStatement") -> str:
  """Returns the claim as plain English, in paragraphs.

  Epsilon and delta are rounded up, so the text never claims more than the
  numbers.

  Args:
    statement: any statement.

  Returns:
    Paragraphs separated by empty lines, without markup.
  """
  parts = [
    ("Privacy", summarize(statement)),
    *(write_release(one, statement.unit) for one in statement.ledger),
    *bounds(statement),
  ]
  return "\n\n".join(f"{lead}. {text}" for lead, text in parts)


def bounds(
  statement: "statement_lib.PrivacyStatement",
) -> Iterator[tuple[str, str]]:
  """Yields titles and texts: several records of one person, and `SECTIONS`."""
  if statement.ledger and statement.is_finite:
    text = _WORDS["claim"]["several"]
    values = {"unit": statement.unit, "two": for_two(statement)}
    yield "Several records of one person", _fill(text, **values)
  for section, title in SECTIONS.items():
    if found := sentences(statement, section):
      yield title, " ".join(found)


def summarize(statement: "statement_lib.PrivacyStatement") -> str:
  """Returns what is claimed, for which unit, in a few sentences."""
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
  return text + _reason(statement) if kind == "none" else text


def _reason(statement: "statement_lib.PrivacyStatement") -> str:
  """Says why epsilon is infinite although there is noise, or "" for no noise."""
  runs = [release.run() for release in statement.ledger]
  if not runs or any(run.noise_multiplier == 0 for run in runs):
    return ""
  reason = reasons.explain_infinite(
    runs, delta=statement.delta, relation=statement.relation
  )
  return f" The reason: {reason}." if reason else ""


def write_release(
  one: releases.Release, unit: unit_lib.Unit
) -> tuple[str, str]:
  """Returns title and text of an entry of a ledger, for the unit of its claim."""
  words, size, bands = _WORDS["claim"], one.group_size, one.noise_bands
  mechanism = write(one.mechanism, unit)
  if one.mechanism in _WORDS["mechanisms"]:
    mechanism += ", Gaussian noise"
  text = _fill(
    words["release"],
    mechanism=mechanism,
    steps=one.steps,
    clip=f"{one.l2_clip_norm:g}",
    noise=rounding.noise(one.noise_multiplier, digits=6),
    sensitivity=f"{one.l2_sensitivity:g}",
    bands=_fill(words["bands"], bands=bands) if bands > 1 else "",
    drawn=_fill(_WORDS["sampling"][one.sampling], **vars(one)),
  )
  if size > 1:
    is_whole = one.expected_batch_size == one.num_examples
    moved = _fill(words["whole" if is_whole else "mixture"], size=size)
    text += _fill(words["group"], size=size, moved=moved)
  if one.part:
    text += _fill(words["part"], part=one.part)
  return f"Mechanism ({one.identifier})", text
