"""Makes the page of a federated study: tables of methods, and a drawing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from synthq_jax.federated import ranking
from synthq_jax.report import blocks, plots, tables
from synthq_jax.retrieval import significance
from synthq_jax.studies import frame
from synthq_jax.studies.federated import data, methods

__all__ = ["average_values", "make_notes", "make_page"]

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
"""Sentence MRR@10 on Fed-NewsQA in the thesis, with other texts and another model."""

_WORDS = frame.load_words("federated")
_MAIN = "MRR@10"
_DRAWN = 40  # maximum number of clients in the drawing
_MEANS = ("clients", "questions")
"""Units of a mean: clients weigh the same, or in proportion to their questions."""

Group = Sequence[methods.Outcome]
"""Repetitions of one method."""
Columns = dict[str, Callable[[Any], str]]


def make_notes(config: Any) -> tuple[str, ...]:
  """Describes the settings in sentences for readers.

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
    "rates": _describe_rates(config),
    "stopped": _WORDS.text("stopped", patience=patience) if patience else "",
  }
  names = ("towers", "training", "personal")
  return tuple(_WORDS.text(name, **values) for name in names)


def _describe_rates(config: Any) -> str:
  """Describes the learning rates of the rows."""
  optimizer = "Adam" if config.recipe.weight_decay is None else "AdamW"
  if config.rates:
    rates = ", ".join(f"{rate:g}" for rate in config.rates)
    return _WORDS.text("tuned", optimizer=optimizer, rates=rates)
  central = config.central_learning_rate
  added = "" if central is None else f" ({methods.CENTRAL} at {central:g})"
  return f"{optimizer} at {config.recipe.learning_rate:g}{added}"


def make_page(study: methods.Study) -> blocks.Page:
  """Makes the page: tables first, the drawing last."""
  main = study.outcomes
  parts = [_make_effectiveness(main), _make_client_table(study.facts, main)]
  moved = [row for row in main if row.exchanges]
  if moved:
    columns: Columns = {
      "Exchange": lambda row: f"{row.method}, seed {row.seed}"
    }
    words = _WORDS.text("traffic")
    parts.append(_make_table("Traffic", words, moved, columns | _SENT))
  together: Columns = {
    "Method": lambda group: group[0].method,
    "Trainings": lambda group: str(len(group)),
    "Together": lambda group: tables.duration(sum(x.seconds for x in group)),
  }
  groups = _group_by_method(main).values()
  parts.append(_make_table("Times", _WORDS.text("times"), groups, together))
  drawing = blocks.Figure(
    svg=_draw(study.facts, main),
    caption="MRR@10 of clients, with their train questions",
    file="study.svg",
  )
  title = f"MRR@10 of clients, the largest first ({_DRAWN} at most)"
  return blocks.Page(
    title="Answer sentences over clients",
    introduction=(
      blocks.Paragraph(text=_describe_setting(study.facts)),
      blocks.Items(texts=study.notes),
    ),
    parts=(*parts, frame.make_part(title, drawing)),
  )


def _make_table(
  title: str, words: str, rows: Any, columns: Columns
) -> blocks.Part:
  return frame.make_part(
    title, blocks.Paragraph(text=words), tables.of(rows, columns)
  )


def _describe_setting(facts: data.Facts) -> str:
  notes = {
    "left_out": facts.num_left_out,
    "foreign": facts.num_foreign_judgements or facts.num_lost_questions,
    "shared": facts.num_shared_passages or facts.num_unheld_passages,
  }
  setting = _WORDS.text(
    "setting",
    facts=facts,
    clients=len(facts.clients),
    sentences=sum(client.num_sentences for client in facts.clients),
    train=sum(client.num_train for client in facts.clients),
    test=sum(client.num_test for client in facts.clients),
  )
  sentences = [
    _WORDS.text(key, facts=facts) for key, count in notes.items() if count
  ]
  return " ".join([setting, *sentences])


def average_values(
  group: Group, measure: str = _MAIN, level: str = "sentence"
) -> list[np.ndarray]:
  """Averages a measure over repetitions, for each client and question.

  Args:
    group: outcomes of one method.
    measure: name of a measure, as in `ranking.Scores`.
    level: "sentence" or "passage".

  Returns:
    An array [question] for each client.
  """
  by_seed = [
    [client.values(measure, level) for client in outcome.ranks]
    for outcome in group
  ]
  return [np.mean(client, axis=0) for client in zip(*by_seed, strict=True)]


def _group_by_method(outcomes: Group) -> dict[str, Group]:
  return frame.group_by(outcomes, lambda outcome: outcome.method)


def _get_weights(group: Group, over: str) -> list[int] | None:
  """Returns the clients' weights in a mean over one of `_MEANS`; None for equal."""
  if over == "clients":
    return None
  return [len(client.sentence) for client in group[0].ranks]


def _compute_mean(
  group: Group, over: str, measure: str = _MAIN, level: str = "sentence"
) -> float:
  means = [client.mean() for client in average_values(group, measure, level)]
  return float(np.average(means, weights=_get_weights(group, over)))


def _write_both_means(*measure: str) -> Callable[[Group], str]:
  """Returns a function that writes both means of a measure, and its level."""
  return lambda group: ", ".join(
    f"{_compute_mean(group, over, *measure):.3f}" for over in _MEANS
  )


def _compare(
  reference: Group | None, tested: int
) -> dict[str, Callable[[Group], str]]:
  """Returns columns of both means of the main measure, and of their tests.

  Args:
    reference: group that all others are tested against; None for no tests.
    tested: number of tests, for Bonferroni's correction.
  """

  def interval(over: str) -> Callable[[Group], str]:
    def write(group: Group) -> str:
      mean = significance.stratified_interval(
        average_values(group), _get_weights(group, over), seed=0
      )
      return f"{mean:.3f}"

    return write

  def p_value(over: str) -> Callable[[Group], str]:
    def write(group: Group) -> str:
      if not reference or group[0] is reference[0]:
        return "-"
      p_value = significance.stratified_t_test(
        average_values(group),
        average_values(reference),
        _get_weights(group, over),
      )
      return tables.p_value(min(1.0, p_value * tested))

    return write

  return {
    **{f"{_MAIN} over {over} [95%]": interval(over) for over in _MEANS},
    **{f"p over {over}": p_value(over) for over in _MEANS},
  }


def _write_rates(group: Group) -> str:
  """Writes the learning rate of each repetition, equal ones once."""
  rates = [outcome.learning_rate for outcome in group]
  return ", ".join(dict.fromkeys(tables.number(x, "g") for x in rates))


def _make_effectiveness(main: Group) -> blocks.Part:
  groups = _group_by_method(main)
  reference = groups.get(methods.BASE)

  def seeds(group: Group) -> str:
    means = [_compute_mean([outcome], "clients") for outcome in group]
    return f"{min(means):.3f} to {max(means):.3f}" if len(group) > 1 else "-"

  columns: Columns = {
    "Method": lambda group: group[0].method,
    **_compare(reference, len(groups) - 1),
    "Seeds": seeds,
    "Train MRR@10": lambda group: ", ".join(
      f"{np.mean([outcome.train[i] for outcome in group]):.3f}" for i in (0, 1)
    ),
    "Rates": _write_rates,
    **{
      measure: _write_both_means(measure) for measure in [*ranking.MEASURES][1:]
    },
    **{
      f"Passage {measure}": _write_both_means(measure, "passage")
      for measure in ranking.MEASURES
    },
    "Hubness": lambda group: ", ".join(
      tables.number(outcome.hubness, ".2f") for outcome in group
    ),
    "Worst client": lambda group: (
      f"{min(client.mean() for client in average_values(group)):.3f}"
    ),
    "Thesis, Fed-NewsQA": lambda group: (
      f"{THESIS[group[0].method]:.3f}" if group[0].method in THESIS else "-"
    ),
  }
  return _make_table(
    "Retrieval of answer sentences",
    _WORDS.text("effectiveness", base=methods.BASE),
    groups.values(),
    columns,
  )


def _make_client_table(facts: data.Facts, main: Group) -> blocks.Part:
  groups = _group_by_method(main)
  by_method = {name: average_values(group) for name, group in groups.items()}
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
      *(f"{clients[at].mean():.3f}" for clients in by_method.values()),
    )
    for at in _sort_by_size(facts.clients)
  ]
  rows += [
    (
      f"mean over {over}",
      *("" for _ in counts),
      *(f"{_compute_mean(group, over):.3f}" for group in groups.values()),
    )
    for over in _MEANS
  ]
  words = "Sentence MRR@10."
  single = by_method.get("STAR, each client alone")
  base = by_method.get(methods.BASE)
  if single and base:
    gains = [b.mean() - a.mean() for a, b in zip(single, base, strict=True)]
    sizes = [client.num_train for client in facts.clients]
    if len(gains) > 2 and np.ptp(sizes) and np.ptp(gains):
      value = float(stats.spearmanr(sizes, gains).statistic)
      correlation = _WORDS.text("correlation", base=methods.BASE, value=value)
      words = f"{words} {correlation}"
  columns: Columns = {
    name: lambda row, at=at: row[at]
    for at, name in enumerate(("Client", *counts, *by_method))
  }
  return _make_table("Clients", words, rows, columns)


def _write_mebibytes(
  side: str, over_clients: Callable[[np.ndarray], float]
) -> Callable[[methods.Outcome], str]:
  def write(outcome: methods.Outcome) -> str:
    if not outcome.exchanges:
      return "-"
    in_a_round = np.array(getattr(outcome, side)) / outcome.exchanges
    return f"{over_clients(in_a_round) / 2**20:.2f}"

  return write


_SENT: Columns = {
  "Sent": _write_mebibytes("sent", np.mean),
  "Received": _write_mebibytes("received", np.mean),
  "Most sent": _write_mebibytes("sent", np.max),
  "Most received": _write_mebibytes("received", np.max),
}


def _sort_by_size(clients: Sequence[data.ClientFacts]) -> list[int]:
  """Sorts clients by train questions, then sentences, the largest first."""
  sizes = [(client.num_train, client.num_sentences) for client in clients]
  return sorted(range(len(clients)), key=sizes.__getitem__, reverse=True)


def _draw(facts: data.Facts, outcomes: Group) -> str:
  main, clients = _group_by_method(outcomes), facts.clients
  order = _sort_by_size(clients)[:_DRAWN]
  preferred = ("STAR, each client alone", methods.BASE, methods.CENTRAL)
  points = {}
  for name in [name for name in preferred if name in main] or main:
    means = [float(client.mean()) for client in average_values(main[name])]
    points[name] = [means[i] for i in order]
  return plots.in_rows(
    [f"{clients[i].name} ({clients[i].num_train:,})" for i in order],
    points,
    label="sentence MRR@10 (client: its train questions)",
  )
