"""Collections of ir_datasets, with a stand-in for the package."""

import collections
import sys
import types

import pytest

from synthq_jax.data import ir_datasets_sets


def record(**fields):
  text = fields.pop("text", "")
  return types.SimpleNamespace(**fields, default_text=lambda: text)


class Dataset:
  def __init__(self, missing: str = ""):
    for what in ("docs", "queries", "qrels"):
      setattr(self, f"has_{what}", lambda what=what: what != missing)

  def metadata(self):
    return {"docs": {"count": 2}}

  def docs_iter(self):
    yield record(doc_id="FT911-1", text="A text about polio.")
    yield record(doc_id="FT911-2", text="Another.")

  def queries_iter(self):
    yield record(query_id="302", text="Polio\n vaccines")
    yield record(query_id="303", text=" ")

  def qrels_iter(self):
    yield record(query_id="302", doc_id="FT911-1", relevance=2)
    yield record(query_id="302", doc_id="FT911-2", relevance=0)
    yield record(query_id="302", doc_id="lost", relevance=1)
    yield record(query_id="303", doc_id="FT911-1", relevance=1)


def install(monkeypatch, **datasets):
  package = types.ModuleType("ir_datasets")
  package.load = datasets.__getitem__
  monkeypatch.setitem(sys.modules, "ir_datasets", package)


def test_a_dataset_becomes_a_collection_whose_documents_stay_away(monkeypatch):
  install(monkeypatch, robust=Dataset())
  lost = collections.Counter()
  found = ir_datasets_sets.read("robust", dangling=lost)
  assert lost == {"document": 1, "query": 1}
  assert [each.contents for each in found.documents] == [
    "A text about polio.",
    "Another.",
  ]
  assert [(q.id, q.text) for q in found.queries] == [("302", "Polio vaccines")]
  grades = {"FT911-1": 2, "FT911-2": 0, "lost": 1}
  assert found.qrels == {"test": {"302": grades}}
  assert found.lacking == {"lost"}
  assert found.pairs("test") == [("302", "FT911-1")]
  assert not isinstance(found.documents, tuple)
  assert ir_datasets_sets.num_documents("robust") == len(found.documents)


def test_what_cannot_be_read_is_one_line(monkeypatch):
  install(monkeypatch, robust=Dataset())
  with pytest.raises(ValueError, match="known document, got another"):
    ir_datasets_sets.read("robust")
  install(monkeypatch, robust=Dataset(missing="qrels"))
  with pytest.raises(ValueError, match="robust: .* got no qrels"):
    ir_datasets_sets.read("robust")
  with pytest.raises(ValueError, match="got 'nonsense'; see https"):
    ir_datasets_sets.read("nonsense")
  monkeypatch.setitem(sys.modules, "ir_datasets", None)
  with pytest.raises(ImportError, match="pip install .*ir-datasets") as caught:
    ir_datasets_sets.read("robust")
  assert "\n" not in str(caught.value)
