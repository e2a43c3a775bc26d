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
_BASES = {  # of the third person
  "absorbs": "absorb", "accepts": "accept", "affects": "affect",
  "allows": "allow", "applies": "apply", "binds": "bind", "blocks": "block",
  "breaks": "break", "calls": "call", "carries": "carry", "causes": "cause",
  "changes": "change", "checks": "check", "combines": "combine",
  "compares": "compare", "computes": "compute", "contains": "contain",
  "controls": "control", "converts": "convert", "covers": "cover",
  "creates": "create", "decreases": "decrease", "defines": "define",
  "describes": "describe", "destroys": "destroy", "determines": "determine",
  "enables": "enable", "explains": "explain", "explores": "explore",
  "expresses": "express", "forms": "form", "generates": "generate",
  "gives": "give", "handles": "handle", "has": "have", "helps": "help",
  "holds": "hold", "identifies": "identify", "improves": "improve",
  "includes": "include", "increases": "increase", "indicates": "indicate",
  "inhibits": "inhibit", "involves": "involve", "keeps": "keep",
  "limits": "limit", "loads": "load", "makes": "make", "manages": "manage",
  "means": "mean", "measures": "measure", "moves": "move", "needs": "need",
  "offers": "offer", "performs": "perform", "prevents": "prevent",
  "prints": "print", "processes": "process", "produces": "produce",
  "promotes": "promote", "protects": "protect", "provides": "provide",
  "reads": "read", "receives": "receive", "reduces": "reduce",
  "regulates": "regulate", "releases": "release", "removes": "remove",
  "represents": "represent", "requires": "require", "returns": "return",
  "runs": "run", "sends": "send", "separates": "separate", "sets": "set",
  "shows": "show", "specifies": "specify", "stimulates": "stimulate",
  "stores": "store", "supports": "support", "surrounds": "surround",
  "takes": "take", "tells": "tell", "transports": "transport",
  "treats": "treat", "uses": "use", "writes": "write",
}  # fmt: skip
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


_GERUNDS = {
  word: word_of
  for word, word_of in (
    ("adding", "add"), ("applying", "apply"), ("building", "build"),
    ("calling", "call"), ("changing", "change"), ("checking", "check"),
    ("choosing", "choose"), ("combining", "combine"), ("comparing", "compare"),
    ("computing", "compute"), ("configuring", "configure"),
    ("connecting", "connect"), ("controlling", "control"),
    ("converting", "convert"), ("copying", "copy"), ("creating", "create"),
    ("customizing", "customize"), ("debugging", "debug"),
    ("defining", "define"), ("deleting", "delete"), ("deploying", "deploy"),
    ("disabling", "disable"), ("enabling", "enable"),
    ("extending", "extend"), ("finding", "find"), ("fixing", "fix"),
    ("getting", "get"), ("handling", "handle"), ("implementing", "implement"),
    ("importing", "import"), ("improving", "improve"),
    ("installing", "install"), ("loading", "load"), ("making", "make"),
    ("managing", "manage"), ("measuring", "measure"), ("modifying", "modify"),
    ("monitoring", "monitor"), ("opening", "open"), ("overriding", "override"),
    ("passing", "pass"), ("performing", "perform"), ("plotting", "plot"),
    ("preparing", "prepare"), ("preventing", "prevent"),
    ("protecting", "protect"), ("reading", "read"), ("removing", "remove"),
    ("restoring", "restore"), ("running", "run"), ("saving", "save"),
    ("selecting", "select"), ("sending", "send"), ("setting", "set"),
    ("sharing", "share"), ("solving", "solve"), ("sorting", "sort"),
    ("starting", "start"), ("storing", "store"), ("testing", "test"),
    ("updating", "update"), ("upgrading", "upgrade"), ("using", "use"),
    ("validating", "validate"), ("viewing", "view"), ("working", "work"),
    ("writing", "write"),
  )
}  # fmt: skip
_PARTS = frozenset(
  "advantages benefits causes characteristics complications components"
  " consequences definition diagnosis diseases disorders effects elements"
  " examples features functions function goals history importance limitations"
  " origins parts properties purpose reasons results risks role signs structure"
  " symptoms treatment types uses".split()
)
