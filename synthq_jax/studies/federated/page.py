"""Shows a federated study: tables of methods and exchanges, and a drawing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax.federated import ranking
from synthq_jax.privacy import rounding
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

Group = Sequence[methods.Outcome]
"""Repetitions of one method."""
Columns = dict[str, Callable[[Any], str]]


def notes(config: Any) -> tuple[str, ...]:
  """Says what a reader must know of the settings.

  Args:
    config: a `federated.Config`.
  """
  central, limit = config.central_learning_rate, config.max_train_questions
  values = {
    "config": config,
    "recipe": config.recipe,
    "personal": config.personal,
    "start": "a given T5" if config.checkpoint else "the package's small T5",
    "told": "all" if limit is None else f"at most {limit:,}",
    "rates": "" if central is None else f" ({methods.CENTRAL} at {central:g})",
    "partners": config.exchange_partners or "all",
  }
  said = ("towers", "training", "personal")
  return tuple(_WORDS.text(name, **values) for name in said)


def page(found: methods.Study) -> blocks.Page:
  """Returns the page, whose tables come first and the drawing last."""
  main = [one for one in found.outcomes if not one.variant]
  once = [one for one in found.outcomes if one.method == methods.EXCHANGE]
  others = [one for one in found.outcomes if one.variant and one not in once]
  parts = [_effectiveness(main), _by_client(found.facts, main)]
  if others:
    base = [one for one in main if (one.method, one.seed) == (methods.BASE, 0)]
    parts.append(_variants([*base, *others]))
  moved = [one for one in main if one.exchanges]
  if moved:
    columns: Columns = {
      "Exchange": lambda one: f"{one.method}, seed {one.seed}"
    }
    words = _WORDS.text("traffic", units=_WORDS.text("units"))
    parts.append(_table("Traffic", words, moved, columns | _SENT))
  if once:
    parts.append(_exchanges(once))
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
    [one.scores().values(measure, level) for one in outcome.ranks]
    for outcome in group
  ]
  return [np.mean(one, axis=0) for one in zip(*by_seed, strict=True)]


def _groups(outcomes: Group) -> dict[str, Group]:
  return frame.grouped(outcomes, lambda one: one.method)


def _mean(group: Group, measure: str = _MAIN, level: str = "sentence") -> float:
  found = values(group, measure, level)
  return float(np.mean([one.mean() for one in found]))


def _with_interval(group: Group) -> str:
  one = significance.stratified_interval(values(group), seed=0)
  return f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"


def _p_value(group: Group, reference: Group | None, tested: int) -> str:
  """Writes p against another group; "-" where that is the same, or none."""
  if not reference or group[0] is reference[0]:
    return "-"
  test = significance.stratified_t_test(values(group), values(reference))
  return tables.p_value(min(1.0, test.p_value * tested))


def _effectiveness(main: Group) -> blocks.Part:
  groups = _groups(main)
  reference = groups.get(methods.BASE)

  def seeds(group: Group) -> str:
    means = [_mean([one]) for one in group]
    return f"{min(means):.3f} to {max(means):.3f}" if len(group) > 1 else "-"

  def mean(*what: str) -> Callable[[Group], str]:
    return lambda group: f"{_mean(group, *what):.3f}"

  columns: Columns = {
    "Method": lambda group: group[0].method,
    "MRR@10 [95%]": _with_interval,
    "Seeds": seeds,
    **{measure: mean(measure) for measure in ranking.MEASURES[1:]},
    "Passage MRR@10": mean(_MAIN, "passage"),
    "Worst client": lambda group: (
      f"{min(one.mean() for one in values(group)):.3f}"
    ),
    f"p against {methods.BASE}": lambda group: _p_value(
      group, reference, len(groups) - 1
    ),
    "Thesis, Fed-NewsQA": lambda group: (
      f"{THESIS[group[0].method]:.3f}" if group[0].method in THESIS else "-"
    ),
  }
  return _table(
    "Retrieval of answer sentences",
    _WORDS.text("effectiveness"),
    groups.values(),
    columns,
  )


def _by_client(facts: data.Facts, main: Group) -> blocks.Part:
  found = {name: values(group) for name, group in _groups(main).items()}

  def mean(name: str) -> Callable[[int], str]:
    return lambda at: f"{found[name][at].mean():.3f}"

  def count(name: str) -> Callable[[int], str]:
    return lambda at: tables.count(getattr(facts.clients[at], name))

  columns: Columns = {
    "Client": lambda at: facts.clients[at].name,
    "Passages": count("num_passages"),
    "Sentences": count("num_sentences"),
    "Train questions": count("num_train"),
    "Test questions": count("num_test"),
    **{name: mean(name) for name in found},
  }
  words = "Sentence MRR@10."
  alone, base = found.get("STAR, each client alone"), found.get(methods.BASE)
  if alone and base:
    gains = [b.mean() - a.mean() for a, b in zip(alone, base, strict=True)]
    sizes = [one.num_train for one in facts.clients]
    if len(gains) > 2 and np.ptp(sizes) and np.ptp(gains):
      value = _spearman(sizes, gains)
      said = _WORDS.text("correlation", base=methods.BASE, value=value)
      words = f"{words} {said}"
  return _table("Clients", words, _largest_first(facts.clients), columns)


def _variants(group: Group) -> blocks.Part:
  base = [one for one in group if not one.variant]
  columns: Columns = {
    "Setting": lambda one: one.variant or "as in the main table",
    "MRR@10 [95%]": lambda one: _with_interval([one]),
    "p": lambda one: _p_value([one], base, len(group) - len(base)),
    "R@20": lambda one: f"{_mean([one], 'R@20'):.3f}",
    "Hubness": lambda one: f"{one.hubness:.2f}",
  }
  title = f"{methods.BASE} with other settings"
  return _table(title, _WORDS.text("variants"), group, columns)


def _exchanges(once: Group) -> blocks.Part:
  base = [one for one in once if not one.exchanges][:1]
  columns: Columns = {
    "Exchange": lambda one: one.variant,
    "MRR@10 [95%]": lambda one: _with_interval([one]),
    "p against none": lambda one: _p_value([one], base, len(once) - 1),
  }
  words = _WORDS.text("exchanges", units=_WORDS.text("units"))
  return _table("Exchanges", words, once, columns | _SENT)


def _mebibytes(
  side: str, over_clients: Callable[[np.ndarray], float]
) -> Callable[[methods.Outcome], str]:
  def written(one: methods.Outcome) -> str:
    if not one.exchanges:
      return "-"
    in_a_round = np.array(getattr(one, side)) / one.exchanges
    return f"{over_clients(in_a_round) / 2**20:.2f}"

  return written


def _promised(epsilon: float) -> str:
  if np.isnan(epsilon):
    return "-"
  return "none promised" if np.isinf(epsilon) else rounding.epsilon(epsilon)


_SENT: Columns = {
  "Sent": _mebibytes("sent", np.mean),
  "Received": _mebibytes("received", np.mean),
  "Most sent": _mebibytes("sent", np.max),
  "Most received": _mebibytes("received", np.max),
  "Epsilon per question": lambda one: _promised(one.epsilon_questions),
  "Epsilon per passage": lambda one: _promised(one.epsilon_collection),
}


def _largest_first(clients: Sequence[data.ClientFacts]) -> list[int]:
  """Returns the clients' order by train questions, then by sentences."""
  sizes = [(one.num_train, one.num_sentences) for one in clients]
  return sorted(range(len(clients)), key=sizes.__getitem__, reverse=True)


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
  from scipy import stats

  return float(stats.spearmanr(left, right).statistic)


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
