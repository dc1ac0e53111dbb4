"""Translation: batches, truncation, beam search and metrics."""

import numpy as np
import pytest
import sacrebleu
import torch

from headstock.data.records import Records
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.decoding.beam_search import beam_search
from headstock.decoding.sampling import suppressed_tokens
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.labelled import metric_value
from headstock.tasks.translate import Translate, TranslateConfig
from headstock.train.evaluate import model_outputs
from tests.tasks.parallel import model_for, sentences

ROWS = sentences(30, "rows")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for row in ROWS for text in row], TokenizerSettings(vocabulary=300))


@pytest.fixture(scope="module")
def task(tokenizer):
    return Translate(TranslateConfig(), tokenizer)


def records(rows=ROWS):
    sources, targets = map(list, zip(*rows, strict=True))
    return Records("rows.tsv", list(range(2, len(rows) + 2)), {"source": sources, "target": targets})


def test_batch_has_source_and_teacher_forced_target(task, tokenizer):
    data = task.prepare(records())
    examples = task.examples(data, length=32)
    batch = examples.batch([0, 5])
    for row, index in enumerate([0, 5]):
        source, target = data.tokens[index], data.targets[index]
        assert batch.source.tokens[row].tolist()[: len(source) + 1] == [*source, tokenizer.eos]
        assert batch.tokens[row].tolist()[: len(target) + 1] == [tokenizer.bos, *target]
        labels = batch.labels["token"][row]
        assert labels[labels != IGNORE_INDEX].tolist() == [*target, tokenizer.eos]
    assert tokenizer.decode(data.targets[3]) == ROWS[3][1]
    real = sum(len(side[i]) + 1 for side in (data.tokens, data.targets) for i in (0, 5))
    assert task.tokens(batch) == real and examples.lengths[[0, 5]].sum() == real
    assert examples.name(0) == "rows.tsv:2"
    padded = padded_batch(examples, [0], 3)
    assert task.counts(padded)["token"] == len(data.targets[0]) + 1
    assert task.tokens(padded) == examples.lengths[0]


def test_decoder_sees_the_source_but_not_future_tokens(task):
    model = model_for(task)
    data = task.prepare(records())
    batch = task.examples(data, length=32).batch([0])
    before = model(batch).hidden
    batch.tokens[0, -1] += 1
    assert torch.allclose(model(batch).hidden[:, :-1], before[:, :-1])
    batch.tokens[0, -1] -= 1
    batch.source.tokens[0, 0] += 1
    assert not torch.allclose(model(batch).hidden[:, 0], before[:, 0])


def test_long_sentences_are_truncated_with_a_warning_or_refused(task, tokenizer):
    rows = [*ROWS[:2], (" ".join([ROWS[0][0]] * 8), ROWS[0][1])]
    data = task.prepare(records(rows))
    length = len(data.tokens[2])
    assert task.reading_warnings(task.prepare(records()), length=32) == []
    assert task.reading_warnings(data, length=length) == [
        f"1 sentence is longer than a row of {length} tokens and truncated, first rows.tsv:4"
    ]
    assert task.reading_warnings(data, length=length + 1) == []
    batch = task.examples(data, length=length).batch([2])
    assert batch.source.tokens.tolist() == [[*data.tokens[2][: length - 1], tokenizer.eos]]
    truncated = task.examples(data, length=4).batch([0])
    assert truncated.labels["token"].tolist() == [data.targets[0][:4]]  # no EOS label after truncation
    strict = Translate(TranslateConfig(long="refuse"), tokenizer)
    with pytest.raises(UserError, match=f"rows.tsv:4 has {length} tokens"):
        strict.examples(data, length=length)
    strict.examples(data, length=length + 1)


def test_translations_do_not_depend_on_the_batch(task):
    model = model_for(task)
    data = task.prepare(records(), labelled=False)
    assert data.targets is None
    outputs = model_outputs(model, task, data, length=32)
    for row in (0, 7, 19):
        (output,) = model_outputs(model, task, data.select([row]), length=32)
        assert np.array_equal(output, outputs[row])


def test_outputs_match_beam_search(tokenizer):
    greedy, wide = (Translate(TranslateConfig(beams=beams, max_tokens=9), tokenizer) for beams in (1, 4))
    model = model_for(greedy)
    data = greedy.prepare(records(ROWS[:6]))
    source = [[*data.tokens[0], tokenizer.eos]]
    options = {
        "end": tokenizer.eos,
        "suppress_tokens": suppressed_tokens(tokenizer, tokenizer.vocabulary),
        "sources": source,
    }
    scores = []
    for task, beams in ((greedy, 1), (wide, 4)):
        outputs = model_outputs(model, task, data, length=32)
        assert max(map(len, outputs)) <= 9
        best = beam_search(model, [[tokenizer.bos]], beams=beams, max_tokens=9, **options)[0][0]
        assert outputs[0].astype(int).tolist() == best.tokens
        scores.append(best.score)
        assert not set(outputs[0].astype(int)) & (tokenizer.all_special_ids - {tokenizer.unk})
    assert scores[1] >= scores[0]


def test_metrics_match_sacrebleu(task):
    data = task.prepare(records())
    # the last ten are translations of other rows
    hypotheses = [row[1] for row in ROWS[:20]] + [row[1] for row in ROWS[1:11]]
    outputs = [np.array(task.tokenizer.encode(text), dtype=np.float32) for text in hypotheses]
    assert [row["text"] for row in task.predictions(data, outputs)] == hypotheses
    references = [row[1] for row in ROWS]
    metrics = task.row_metrics(data, outputs)
    assert metric_value(metrics["bleu"]) == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score / 100)
    assert metric_value(metrics["chrf"]) == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score / 100)
    assert 0.5 < metric_value(metrics["bleu"]) < 1
    assert "tok:13a" in task.extra_metrics(data, outputs)["signature"]["bleu"]


def test_checkpoint_selection_by_bleu(tokenizer):
    task = Translate(TranslateConfig(validate_bleu=True), tokenizer)
    model = model_for(task)
    data = task.prepare(records(ROWS[:5]))
    batch = padded_batch(task.examples(data, length=32), range(5), 7)
    with torch.no_grad():
        sums = task.losses(model, batch)
    metrics = task.score({name: float(value) for name, value in sums.items()}, task.counts(batch), size=0)
    greedy = Translate(TranslateConfig(beams=1), tokenizer)
    hypotheses = [row["text"] for row in greedy.predictions(data, model_outputs(model, greedy, data, length=32))]
    assert metrics["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [[row[1] for row in ROWS[:5]]]).score / 100
    )
    assert task.selection_score({"bleu": 0.3, "loss": 9.0}) < task.selection_score({"bleu": 0.2, "loss": 1.0})
    assert "bleu 0" not in task.losses(model.train(), batch)  # no decoding in training


def test_separate_source_and_target_tokenizers():
    sources, targets = map(list, zip(*ROWS, strict=True))
    tokenizer = train_tokenizer(targets, TokenizerSettings(vocabulary=290))
    with pytest.raises(UserError, match="two_tokenizers"):
        Translate(TranslateConfig(two_tokenizers=True), tokenizer)
    tokenizer.source_tokenizer = train_tokenizer(sources, TokenizerSettings(vocabulary=320))
    task = Translate(TranslateConfig(two_tokenizers=True), tokenizer)
    data = task.prepare(records())
    assert data.tokens[0] == tokenizer.source_tokenizer.encode(sources[0]) and data.targets[0] == tokenizer.encode(
        targets[0]
    )
    model = model_for(task, source=tokenizer.source_tokenizer.vocabulary)
    assert len(model_outputs(model, task, data, length=32)) == len(ROWS)


def test_invalid_settings_are_refused():
    for settings in ({"beams": 0}, {"no_repeat": -1}, {"max_tokens": 0}, {"length_penalty": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            TranslateConfig(**settings)
