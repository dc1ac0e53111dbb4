"""A user's script with every public name, for type checkers. It is checked, not run."""

from pathlib import Path

import numpy as np

import headstock
from headstock import (
    AnswerPrediction,
    ArmDifference,
    ArmScore,
    ClassPrediction,
    Comparison,
    Evaluation,
    Event,
    Explanation,
    Export,
    FilledText,
    Generation,
    Hit,
    ImportedRun,
    LRCurve,
    OrdinalPrediction,
    Pipeline,
    Plan,
    Prediction,
    Result,
    ResultList,
    RunResult,
    Suggestion,
    SweepPoint,
    SweepResult,
    TagPrediction,
    TextScore,
    TranslationPrediction,
    UserError,
    ValuePrediction,
    WorkError,
)

VERSION: str = headstock.__version__


def on_event(event: Event) -> None:
    step: int = event.step
    loss: float = event.loss
    metrics: dict[str, float] = event.metrics
    print(event.kind, event.epoch, step, loss, metrics, event.lr, event.time_left)


def train() -> None:
    plan: Plan = headstock.plan(["a text", "another"], minutes=5, documents="line")
    curve: LRCurve = headstock.lr_find(["a text"], preset="gpt-nano", depth=2)
    rate: float | None = curve.suggestion
    run: RunResult = headstock.pretrain(
        Path("corpus.txt"), out="runs/p", settings=plan.settings, lr=rate or 1e-3, callbacks=[on_event], progress=False
    )
    steps: int = run.steps
    loss: float = run.metrics["loss"]
    rows: list[tuple[str, str]] = [("good", "pos"), ("bad", "neg")]
    tuned: RunResult = headstock.finetune(run.run, train=rows, out=Path("runs/f"), epochs=3, class_weights=[1.0, 2.0])
    accuracy: float | None = None if tuned.test is None else tuned.test["accuracy"]
    student: RunResult = headstock.distil(run.run, teachers=[tuned.run], text=["a text"], train=rows, out="runs/d")
    comparison: Comparison = headstock.compare("reviews-en", train=rows, out="runs/c", labels=100, seeds=3)
    score: ArmScore = comparison.score("pretrained", labels=100)
    difference: ArmDifference = comparison.differences[0]
    found: SweepResult = headstock.sweep("corpus.txt", grid={"lr": [1e-3]}, out="runs/s", method="grid", depth=2)
    points: ResultList[SweepPoint] = found.points
    together: headstock.EnsembleResult = headstock.ensemble(
        [tuned.run], train=rows, valid=rows, out="runs/e", tfidf=True
    )
    weights: dict[str, float] = together.weights
    exported: Export = headstock.export_run(tuned.run, "out", to="onnx")
    imported: ImportedRun = headstock.import_run("out", out="runs/i")
    print(steps, loss, accuracy, student.report, score.low, difference.high, points[:2].to_frame())
    print(weights, exported.folder, imported.path)


def use() -> None:
    pipeline: Pipeline = headstock.load("runs/f", device="cpu")
    generations: ResultList[Generation] = pipeline.generate("Once", max_tokens=3, temperature=0.7)
    text: str = generations[0].text
    filled: ResultList[FilledText] = pipeline.fill("a [MASK]")
    scores: ResultList[TextScore] = pipeline.score(["a"])
    hits: ResultList[ResultList[Hit]] = pipeline.search("a", ["b", "c"], top=1)
    suggestions: ResultList[Suggestion] = pipeline.suggest(["a", "b"], method="margin")
    vectors: np.ndarray | list[np.ndarray] = pipeline.embed(["a"])
    translations: list[str] = pipeline.translate("a", beams=4)
    answers: ResultList[AnswerPrediction] = pipeline.answer("Who?", context="Anne.")
    evaluation: Evaluation = pipeline.evaluate([("good", "pos")])
    value: float = evaluation.value
    predictions: ResultList[Prediction] = pipeline.predict(["good"])
    for prediction in predictions:
        if isinstance(prediction, ClassPrediction):
            label: str = prediction.label
            print(label, prediction.probabilities["pos"])
        elif isinstance(prediction, TagPrediction):
            tags: list[str] = prediction.tags
            print(tags)
        elif isinstance(prediction, ValuePrediction | TranslationPrediction):
            print(prediction)
    results: list[Result] = [filled[0], scores[0], suggestions[0], evaluation]
    print(text, hits[0][0].score, vectors, translations, answers[0].start, value, results, OrdinalPrediction)


def look_inside(pipeline: Pipeline) -> None:
    looks: Explanation = headstock.explain_attention(pipeline, "a", layer=1, head=2)
    page: Path = looks.save("page.html")
    title: str = headstock.explain_parameters(preset="classic", settings={"depth": 2}).title
    print(page, title, looks.to_dict())
    explanations: list[Explanation] = [
        headstock.explain_model(pipeline),
        headstock.explain_hooks("run"),
        headstock.explain_mask(kind="causal", length=4),
        headstock.explain_positions(kind="rotary", width=8),
        headstock.explain_layer(pipeline, "a", layer=1, word="a", way="forward"),
        headstock.explain_gradients(pipeline, "a", depths=False),
        headstock.explain_residual(Path("run"), ["a", "b"]),
        headstock.explain_prediction(pipeline, "a", label="pos"),
        headstock.explain_logits(pipeline, "a", versus="neg"),
        headstock.explain_heads(pipeline, file="rows.csv", method="zero"),
        headstock.explain_patch(pipeline, "a", "b"),
        headstock.explain_induction(pipeline, rows=2),
        headstock.explain_context([pipeline, "run"], by="position"),
    ]
    print(explanations)


def prepare() -> None:
    try:
        corpus = headstock.read_corpus(headstock.download("catalog:tiny-shakespeare"))
        tokenizer = headstock.train_tokenizer(corpus.sample_texts(), kind="bpe", vocabulary=300)
        tokenizer.save(Path("tokenizer.json"))
        headstock.open_tokenizer("tokenizer.json").encode("a")
    except (UserError, WorkError) as error:
        print(error)
