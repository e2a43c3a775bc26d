"""Shows a federated study: tables of methods and exchanges, and a drawing."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from synthq_jax.federated import ranking
from synthq_jax.report import blocks, plots, tables
from synthq_jax.retrieval import significance
from synthq_jax.studies import frame
from synthq_jax.studies.federated import data, methods

__all__ = ["notes", "page", "values"]

THESIS: Mapping[str, float] = {
  "BM25": 0.172,
  "Random negatives": 0.194,
  "BM25 negatives": 0.188,
  "STAR, each client alone": 0.232,
  methods.BASE: 0.261,
  "+ query encoder": 0.289,
  "+ Fed-Negative": 0.309,
  methods.CENTRAL: 0.338,
}
"""Sentence MRR@10 on Fed-NewsQA as the thesis reports it: other texts, another
model."""

_WORDS = frame.words("federated")
_MAIN = "MRR@10"
_DRAWN = 40  # clients
_MEANS = ("clients", "questions")
"""What a mean is over: clients all weigh the same, or as their questions do."""

Group = Sequence[methods.Outcome]
"""Repetitions of one method."""
Columns = dict[str, Callable[[Any], str]]


def notes(config: Any) -> tuple[str, ...]:
  """Says what a reader must know of the settings.

  Args:
    config: a `federated.Config`.
  """
  limit = config.max_train_questions
  start = "a given T5" if config.checkpoint else "the package's small T5"
  start = "a given BERT" if config.bert else start
  patience = config.personal.settings.patience
  values = {
    "config": config,
    "recipe": config.recipe,
    "personal": config.personal,
    "start": start,
    "told": "all" if limit is None else f"at most {limit:,}",
    "rates": _rates_of(config),
    "stopped": _WORDS.text("stopped", patience=patience) if patience else "",
  }
  said = ("towers", "training", "personal")
  return tuple(_WORDS.text(name, **values) for name in said)


def _rates_of(config: Any) -> str:
  """Says at which rates rows are trained."""
  optimizer = "Adam" if config.recipe.weight_decay is None else "AdamW"
  if config.rates:
    rates = ", ".join(f"{rate:g}" for rate in config.rates)
    return _WORDS.text("tuned", optimizer=optimizer, rates=rates)
  central = config.central_learning_rate
  own = "" if central is None else f" ({methods.CENTRAL} at {central:g})"
  return f"{optimizer} at {config.recipe.learning_rate:g}{own}"


def page(found: methods.Study) -> blocks.Page:
  """Returns the page, whose tables come first and the drawing last."""
  main = [one for one in found.outcomes if not one.variant]
  others = [one for one in found.outcomes if one.variant]
  parts = [_effectiveness(main), _by_client(found.facts, main)]
  for method, group in _groups(others).items():
    base = [one for one in main if (one.method, one.seed) == (method, 0)]
    parts.append(_variants([*base, *group]))
  moved = [one for one in main if one.exchanges]
  if moved:
    columns: Columns = {
      "Exchange": lambda one: f"{one.method}, seed {one.seed}"
    }
    words = _WORDS.text("traffic")
    parts.append(_table("Traffic", words, moved, columns | _SENT))
  together: Columns = {
    "Method": lambda group: group[0].method,
    "Trainings": lambda group: str(len(group)),
    "Together": lambda group: tables.duration(sum(x.seconds for x in group)),
  }
  groups = _groups(found.outcomes).values()
  parts.append(_table("Times", _WORDS.text("times"), groups, together))
  drawing = blocks.Figure(
    svg=_drawing(found.facts, main),
    caption="MRR@10 of clients, with their train questions",
    file="study.svg",
  )
  title = f"MRR@10 of clients, the largest first ({_DRAWN} at most)"
  return blocks.Page(
    title="Answer sentences over clients",
    introduction=(
      blocks.Paragraph(text=_setting(found.facts)),
      blocks.Items(texts=found.notes),
    ),
    parts=(*parts, frame.part(title, drawing)),
  )


def _table(title: str, words: str, rows: Any, columns: Columns) -> blocks.Part:
  return frame.part(
    title, blocks.Paragraph(text=words), tables.of(rows, columns)
  )


def _setting(facts: data.Facts) -> str:
  left_out = facts.num_left_out
  return _WORDS.text(
    "setting",
    facts=facts,
    clients=len(facts.clients),
    sentences=sum(one.num_sentences for one in facts.clients),
    train=sum(one.num_train for one in facts.clients),
    test=sum(one.num_test for one in facts.clients),
    left_out=(
      f" {left_out} clients with too few questions left out."
      if left_out
      else ""
    ),
  )


def values(
  group: Group, measure: str = _MAIN, level: str = "sentence"
) -> list[np.ndarray]:
  """Returns a measure by client and question, the mean over repetitions.

  Args:
    group: outcomes of one method.
    measure: as in `ranking.Scores`.
    level: "sentence" or "passage".
  """
  by_seed = [
    [one.values(measure, level) for one in outcome.ranks] for outcome in group
  ]
  return [np.mean(one, axis=0) for one in zip(*by_seed, strict=True)]


def _groups(outcomes: Group) -> dict[str, Group]:
  return frame.grouped(outcomes, lambda one: one.method)


def _weights(group: Group, over: str) -> list[int] | None:
  """Returns the clients' weights in a mean over one of `_MEANS`."""
  if over == "clients":
    return None
  return [len(one.sentence) for one in group[0].ranks]


def _mean(
  group: Group, over: str, measure: str = _MAIN, level: str = "sentence"
) -> float:
  means = [one.mean() for one in values(group, measure, level)]
  return float(np.average(means, weights=_weights(group, over)))


def _both(*what: str) -> Callable[[Group], str]:
  """Writes both means of a measure."""
  return lambda group: ", ".join(
    f"{_mean(group, over, *what):.3f}" for over in _MEANS
  )


def _compared(
  reference: Group | None, tested: int
) -> dict[str, Callable[[Group], str]]:
  """Returns columns of both means of the main measure, and of their tests.

  Args:
    reference: what all are tested against; None: no tests.
    tested: how many tests there are.
  """

  def interval(over: str) -> Callable[[Group], str]:
    def written(group: Group) -> str:
      one = significance.stratified_interval(
        values(group), _weights(group, over), seed=0
      )
      return f"{one:.3f}"

    return written

  def p_value(over: str) -> Callable[[Group], str]:
    def written(group: Group) -> str:
      if not reference or group[0] is reference[0]:
        return "-"
      test = significance.stratified_t_test(
        values(group), values(reference), _weights(group, over)
      )
      return tables.p_value(min(1.0, test.p_value * tested))

    return written

  return {
    **{f"{_MAIN} over {over} [95%]": interval(over) for over in _MEANS},
    **{f"p over {over}": p_value(over) for over in _MEANS},
  }


def _rates(group: Group) -> str:
  """Writes the learning rate of each repetition, equal ones once."""
  rates = [one.learning_rate for one in group]
  return ", ".join(
    dict.fromkeys("-" if math.isnan(x) else f"{x:g}" for x in rates)
  )


def _effectiveness(main: Group) -> blocks.Part:
  groups = _groups(main)
  reference = groups.get(methods.BASE)

  def seeds(group: Group) -> str:
    means = [_mean([one], "clients") for one in group]
    return f"{min(means):.3f} to {max(means):.3f}" if len(group) > 1 else "-"

  columns: Columns = {
    "Method": lambda group: group[0].method,
    **_compared(reference, len(groups) - 1),
    "Seeds": seeds,
    "Train MRR@10": lambda group: ", ".join(
      f"{np.mean([one.train[place] for one in group]):.3f}" for place in (0, 1)
    ),
    "Rates": _rates,
    **{measure: _both(measure) for measure in ranking.MEASURES[1:]},
    **{
      f"Passage {measure}": _both(measure, "passage")
      for measure in ranking.MEASURES
    },
    "Worst client": lambda group: (
      f"{min(one.mean() for one in values(group)):.3f}"
    ),
    "Thesis, Fed-NewsQA": lambda group: (
      f"{THESIS[group[0].method]:.3f}" if group[0].method in THESIS else "-"
    ),
  }
  return _table(
    "Retrieval of answer sentences",
    _WORDS.text("effectiveness", base=methods.BASE),
    groups.values(),
    columns,
  )


def _by_client(facts: data.Facts, main: Group) -> blocks.Part:
  groups = _groups(main)
  found = {name: values(group) for name, group in groups.items()}
  counts = {
    "Passages": "num_passages",
    "Sentences": "num_sentences",
    "Train questions": "num_train",
    "Test questions": "num_test",
  }
  rows = [
    (
      facts.clients[at].name,
      *(tables.count(getattr(facts.clients[at], x)) for x in counts.values()),
      *(f"{one[at].mean():.3f}" for one in found.values()),
    )
    for at in _largest_first(facts.clients)
  ]
  rows += [
    (
      f"mean over {over}",
      *("" for _ in counts),
      *(f"{_mean(group, over):.3f}" for group in groups.values()),
    )
    for over in _MEANS
  ]
  words = "Sentence MRR@10."
  alone, base = found.get("STAR, each client alone"), found.get(methods.BASE)
  if alone and base:
    gains = [b.mean() - a.mean() for a, b in zip(alone, base, strict=True)]
    sizes = [one.num_train for one in facts.clients]
    if len(gains) > 2 and np.ptp(sizes) and np.ptp(gains):
      value = float(stats.spearmanr(sizes, gains).statistic)
      said = _WORDS.text("correlation", base=methods.BASE, value=value)
      words = f"{words} {said}"
  columns: Columns = {
    name: lambda row, at=at: row[at]
    for at, name in enumerate(("Client", *counts, *found))
  }
  return _table("Clients", words, rows, columns)


def _variants(group: Group) -> blocks.Part:
  base = [one for one in group if not one.variant]
  columns: Columns = {
    "Setting": lambda group: group[0].variant or "as in the main table",
    **_compared(base, len(group) - len(base)),
    "R@20": _both("R@20"),
    "Hubness": lambda group: f"{group[0].hubness:.2f}",
  }
  title = f"{group[0].method} with other settings"
  rows = [[one] for one in group]
  return _table(title, _WORDS.text("variants"), rows, columns)


def _mebibytes(
  side: str, over_clients: Callable[[np.ndarray], float]
) -> Callable[[methods.Outcome], str]:
  def written(one: methods.Outcome) -> str:
    if not one.exchanges:
      return "-"
    in_a_round = np.array(getattr(one, side)) / one.exchanges
    return f"{over_clients(in_a_round) / 2**20:.2f}"

  return written


_SENT: Columns = {
  "Sent": _mebibytes("sent", np.mean),
  "Received": _mebibytes("received", np.mean),
  "Most sent": _mebibytes("sent", np.max),
  "Most received": _mebibytes("received", np.max),
}


def _largest_first(clients: Sequence[data.ClientFacts]) -> list[int]:
  """Returns the clients' order by train questions, then by sentences."""
  sizes = [(one.num_train, one.num_sentences) for one in clients]
  return sorted(range(len(clients)), key=sizes.__getitem__, reverse=True)


def _drawing(facts: data.Facts, outcomes: Group) -> str:
  main, clients = _groups(outcomes), facts.clients
  order = _largest_first(clients)[:_DRAWN]
  wanted = ("STAR, each client alone", methods.BASE, methods.CENTRAL)
  points = {}
  for name in [one for one in wanted if one in main] or main:
    means = [float(one.mean()) for one in values(main[name])]
    points[name] = [means[i] for i in order]
  return plots.in_rows(
    [f"{clients[i].name} ({clients[i].num_train:,})" for i in order],
    points,
    label="sentence MRR@10 (client: its train questions)",
  )
