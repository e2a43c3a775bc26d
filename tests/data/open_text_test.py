import json

import pytest

from synthq_jax.data import open_text


def read(reader, path, content, other=""):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(content)
  if other:
    path.with_name("src-x.txt").write_text(other)
  return [(e.kind, e.title, e.text) for e in open_text.READERS[reader](path)]


MARKDOWN = """---
title: Pipes
questions:
- "How do I join programs?"
---
A [pipe](x.html) joins **two** programs.

## Redirecting output

Use `>` for a file.

```
## not a heading
```

### What is a shell?

It reads commands.
"""
RST = """
Sorting
=======

A list is :func:`sorted` by ``key``.

.. note::
   Not for sets.

It is stable::

   sorted(x)

Why is it stable?
-----------------

Equal items keep their order.
"""
CNXML = """<document xmlns="http://cnx.rice.edu/cnxml">
<title>Bones</title>
<content>
<para>Bone is living <term>tissue</term>.</para>
<section><title>Growth</title><para>Bones grow at plates. Plates close.</para>
<para>Grown bones store calcium. It is a metal.</para></section>
<exercise><problem><para>What do grown bones store?</para>
<list><item>air</item><item>calcium</item></list></problem>
<solution><para>B</para></solution></exercise>
<exercise><problem><para>Why do bones stop growing?</para></problem>
<solution><para>They stop because their plates close at some age.</para></solution>
</exercise>
<exercise><problem><para>Which planets have rings?</para></problem></exercise>
</content>
<glossary><definition><term>marrow</term>
<meaning>soft tissue inside of bones</meaning></definition></glossary>
</document>"""
SQUAD = {
  "data": [
    {
      "paragraphs": [
        {
          "context": "Kites fly. They need wind.",
          "qas": [{"question": " What do kites need? ", "answers": []}],
        }
      ]
    }
  ]
}


@pytest.mark.parametrize(
  ("reader", "content", "wanted"),
  [
    (
      "markdown",
      MARKDOWN,
      [
        (
          "question",
          "How do I join programs?",
          "A pipe joins two programs. ## Redirecting output Use > for a file."
          " ### What is a shell? It reads commands.",
        ),
        ("heading", "Pipes", "A pipe joins two programs."),
        ("heading", "Redirecting output", "Use > for a file."),
        ("question", "What is a shell?", "It reads commands."),
      ],
    ),
    (
      "rst",
      RST,
      [
        ("heading", "Sorting", "A list is sorted by key. It is stable:"),
        ("question", "Why is it stable?", "Equal items keep their order."),
      ],
    ),
    (
      "html",
      "<h1>2.1 Tables</h1><p>A <b>table</b> has rows.</p><pre>x</pre>",
      [("heading", "Tables", "A table has rows.")],
    ),
    (
      "pod",
      "=head1 What is Perl?\n\nA I<language>.\n\n  code\n",
      [("question", "What is Perl?", "A language.")],
    ),
    (
      "textbook",
      CNXML,
      [
        ("heading", "Bones", "Bone is living tissue ."),
        (
          "heading",
          "Growth",
          "Bones grow at plates. Plates close. Grown bones store calcium. It is a"
          " metal.",
        ),
        (
          "question",
          "What do grown bones store?",
          "Bones grow at plates. Plates close. Grown bones store calcium. It is a"
          " metal.",
        ),
        (
          "question",
          "Why do bones stop growing?",
          "They stop because their plates close at some age.",
        ),
        ("heading", "marrow", "marrow: soft tissue inside of bones"),
      ],
    ),
    (
      "pairs_json",
      json.dumps(SQUAD),
      [("question", "What do kites need?", "Kites fly. They need wind.")],
    ),
    (
      "lines_json",
      json.dumps({"question_text": "who sang it", "paragraph_text": "He ."}),
      [("question", "who sang it", "He.")],
    ),
    (
      "code",
      'def f():\n  """Adds one.\n\n  To its argument.\n  """\n',
      [("summary", "Adds one.", "To its argument.")],
    ),
    (
      "table",
      "question\tanswer\tlang\nIs it new?\tYes.\ten\nQuoi?\tOui.\tfr\n",
      [("question", "Is it new?", "Yes.")],
    ),
    (
      "blocks",
      "#id\nA cat sat .\nWho sat?   A cat\tx\nWho sat?   it\n\n#id\nNo .\n",
      [("question", "Who sat?", "A cat sat.")],
    ),
    (
      "wordnet",
      "  1 licence | not read\n"
      "1 03 n 01 ice_axe 0 000 @ 1 n 0000 | "
      'an axe that climbers use to cut steps in the ice; "his axe"\n',
      [],
    ),
  ],
)
def test_a_reader_finds_titles_and_what_stands_below(
  tmp_path, reader, content, wanted
):
  assert read(reader, tmp_path / "file", content) == wanted


def test_a_module_of_exercises_alone_has_their_solutions(tmp_path):
  module = """<document><title>Review</title><content>
<exercise><problem><para>Which planets have several rings?</para></problem>
</exercise><exercise><problem><para>Why is it so?</para></problem>
<solution><para>It is so because they say so in the book.</para></solution>
</exercise></content></document>"""
  assert read("textbook", tmp_path / "file", module) == [
    ("question", "Why is it so?", "It is so because they say so in the book.")
  ]


def test_words_and_their_meanings_are_asked_by_rule(tmp_path):
  line = "1 03 n 01 ice_axe 0 000 | an axe that climbers use to cut steps; x"
  [made] = read("wordnet", tmp_path / "data.noun", f"{line}\n")
  text = "An ice axe is an axe that climbers use to cut steps; x."
  assert made == ("rule", "what is an ice axe", text)


def test_questions_and_sentences_stand_beside_each_other(tmp_path):
  source = "the cat -lrb- red -rrb- sat .\n"
  made = read("parallel", tmp_path / "tgt-x.txt", "who sat ?\n", source)
  assert made == [("question", "who sat?", "the cat (red) sat.")]
