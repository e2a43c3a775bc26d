"""TREC topics in the forms of NIST's own files, and what is refused."""

import json

import pytest

from synthq_jax.data import sources, trec_topics

AS_1993 = """<top>

<head> Tipster Topic Description


<num> Number:  {number}


<dom> Domain:  International Economics


<title> Topic:  {title}


<desc> Description:

Document will report it.


<fac> Factor(s):
<nat> Nationality:  U.S.
</fac>


<def> Definition(s):

</top>
"""
AS_1994 = "<top>\n\n<num> Number:  {number}\n\n<title> Topic:  {title}\n\n<desc> Description:\nwords\n\n</top>\n"
AS_1995 = "<top>\n\n<num> Number:  {number}\n\n<desc> Description: \n{title}\nof two lines\n\n</top>\n"
AS_2004 = "<top>\n\n<num> Number: {number}\n<title>\n{title}\n\n<desc>\nWhat?\n\n<narr>\nSo.\n</top>\n"
AS_XML = "<top lang='en'>\n<num>{number}</num>\n<title lang='en'>{title}</title>\n<desc>x</desc>\n</top>\n"
OF_WEB = (
  '<?xml version="1.0"?>\n<!DOCTYPE webtrack2009 [\n<!ELEMENT topic (query)>\n'
  "<!ATTLIST topic\n number CDATA #REQUIRED>\n]>\n<webtrack2009>\n"
  '<topic number="1" type="faceted">\n<query>obama family tree</query>\n'
  '<description>Find all.</description>\n<subtopic number="1" type="nav">\n'
  "A subtopic.\n</subtopic>\n</topic>\n</webtrack2009>\n"
)


def read(tmp_path, text):
  path = tmp_path / "topics.test.txt"
  path.write_text(text)
  return [(query.id, query.text) for _, query in trec_topics.read(path)]


FORMS = {
  "1993": (
    AS_1993.format(number="051", title="Airbus Subsidies"),
    [("51", "Airbus Subsidies")],
  ),
  "a title of several lines": (
    AS_1994.format(number="151", title="RDT&E of\nnew drugs"),
    [("151", "RDT&E of new drugs")],
  ),
  "a description alone": (
    AS_1995.format(number="201", title="Is it"),
    [("201", "Is it of two lines")],
  ),
  "a title below its tag": (
    AS_2004.format(number="700", title="gasoline tax U.S."),
    [("700", "gasoline tax U.S.")],
  ),
  "a title in tags with attributes": (
    AS_XML.format(number="176", title="R&amp;D &lt; 5 &#39;now&#39;"),
    [("176", "R&D < 5 'now'")],
  ),
  "a web track": (OF_WEB, [("1", "obama family tree")]),
  "a tweet's query": (
    "<top>\n<num> Number: MB051 </num>\n<query> cuts </query>\n<querytime> Tue"
    " </querytime>\n</top>\n",
    [("MB051", "cuts")],
  ),
  "CLEF": (
    "<top>\n<num> C041 </num>\n<EN-title> Pesticides </EN-title>\n<EN-desc> x"
    " </EN-desc>\n</top>\n",
    [("C041", "Pesticides")],
  ),
  "a smaller than": (
    "<top>\n<num> Number: 401\n<title> price < 200 dollars\n<desc>\n</top>\n",
    [("401", "price < 200 dollars")],
  ),
  "two on one line, one unclosed": (
    "<top><num>7<title>List<T> in &Delta<desc>x</top><top><num>8</num><title>b"
    "</title></top>",
    [("7", "List<T> in &Delta"), ("8", "b")],
  ),
  "no </top>, and a comment": (
    "<top>\n<num> 7\n<title> a\n<!-- <top>\n<num> 9 -->\n<top>\n<num> 8\n<title>"
    " b\n",
    [("7", "a"), ("8", "b")],
  ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_topic_gives_its_query(form, tmp_path):
  text, expected = FORMS[form]
  assert read(tmp_path, text) == expected


def test_topics_of_several_years_stand_in_one_file(tmp_path):
  """A pattern from one number to the next title took 151's for 051's."""
  forms = [AS_1993, AS_1994, AS_1995, AS_2004, AS_XML]
  numbers = ["051", "151", "201", "700", "176"]
  text = "".join(
    form.format(number=number, title=f"of {number}")
    for form, number in zip(forms, numbers, strict=True)
  )
  found = read(tmp_path, text)
  assert [number for number, _ in found] == ["51", "151", "201", "700", "176"]
  assert [text.split()[1] for _, text in found] == numbers


REFUSED = {
  "no text": (
    "<top>\n<num> Number: 321 </num>\n<docid>91</docid>\n</top>\n",
    "txt:1: expected a title, a query or a description in each topic, got none",
  ),
  "an empty title alone": (
    "<top>\n<num> 1\n<title> Topic:\n</top>\n",
    "txt:1: expected a title, a query or a descr",
  ),
  "no number": ("\n<top>\n<title> a\n</top>\n", "txt:2: expected a number in"),
  "two numbers": (
    "<top>\n<num> 1\n<title> a\n<num> 2\n<title> b\n</top>\n",
    "txt:1: expected <num> once in a topic, got it 2 times",
  ),
  "two titles": (
    "<top>\n<num> 1\n<EN-title> a\n<FR-title> b\n</top>\n",
    "txt:1: expected <title> once in a topic, got it 2 times",
  ),
  "a topic before <top>": (
    "<num> 1\n<title> a\n</top>\n<top>\n<num> 2\n<title> b\n</top>\n",
    "txt:4: expected <top> before each <num>",
  ),
  "a topic behind </top>": (
    "<top>\n<num> 1\n<title> a\n</top>\n<num> 2\n<title> b\n",
    "txt:1: expected <top> before each <num>",
  ),
  "a number of two words": (
    "<top>\n<num> 1 2\n<title> a\n</top>\n",
    "txt:1: expected a query id without white space",
  ),
  "no topic": ("<queries>\n</queries>\n", "expected topics that begin with"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_file_that_would_lose_a_topic_is_refused(form, tmp_path):
  text, message = REFUSED[form]
  with pytest.raises(ValueError, match=message):
    read(tmp_path, text)


def opened(tmp_path, topics, qrels, name="topics.test.txt"):
  (tmp_path / "corpus").mkdir()
  lines = (
    f"{json.dumps({'id': f'D{number}', 'contents': 'text'})}\n"
    for number in range(5)
  )
  (tmp_path / "corpus" / "a.jsonl").write_text("".join(lines))
  (tmp_path / name).write_text(topics)
  (tmp_path / "qrels.test.txt").write_text(qrels)
  return sources.open(f"anserini:{tmp_path}")


@pytest.mark.parametrize("judged", ["51", "051"])
@pytest.mark.parametrize("number", ["51", "051"])
def test_zeros_before_a_number_part_no_topic_from_its_judgements(
  number, judged, tmp_path, capsys
):
  topics = AS_1993.format(number=number, title="a")
  source = opened(tmp_path, topics, f"{judged} 0 D1 1\n")
  assert source.read().qrels == {"test": {"51": {"D1": 1}}}
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
  ("judged", "name"), [("1", "1"), ("MB001", "MB001"), ("AR1", None)]
)
def test_letters_before_a_number_go_where_judgements_have_none(
  judged, name, tmp_path
):
  """The microblog track judged topic MB001 as 1."""
  topics = "<top>\n<num> Number: MB001 </num>\n<query> cuts </query>\n</top>\n"
  source = opened(tmp_path, topics, f"{judged} 0 D1 1\n")
  if name is None:
    with pytest.raises(ValueError, match="expected topics that are judged"):
      source.read()
  else:
    assert source.read().qrels == {"test": {name: {"D1": 1}}}


def test_descriptions_for_titles_are_said(tmp_path, capsys):
  topics = AS_1994.format(number=1, title="a") + AS_1995.format(
    number=2, title="b"
  )
  assert (
    len(opened(tmp_path, topics, "1 0 D1 1\n2 0 D1 0\n").read().queries) == 2
  )
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and "its description as the query" in said


@pytest.mark.parametrize("name", ["topics.test.txt", "topics.test.tsv"])
def test_a_table_of_topics_may_be_named_txt(name, tmp_path):
  """As Anserini names those of TREC's deep learning track."""
  source = opened(tmp_path, "007\ta < b\n8\tc\n", "007 0 D1 1\n", name)
  assert [query.id for query in source.read().queries] == ["007", "8"]


def test_topics_may_be_named_xml(tmp_path):
  source = opened(tmp_path, OF_WEB, "1 0 D1 1\n", "topics.test.xml")
  assert source.read().pairs("test") == [("1", "D1")]
