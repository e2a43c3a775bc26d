"""Questions that a text answers, made by rule from its title and sentences.

They teach a model the forms of questions (who, when, where, what for, does it)
on any text, where only a little text comes with questions that people asked.
"""

import re
from collections.abc import Iterator

__all__ = ["ask", "is_question"]

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
