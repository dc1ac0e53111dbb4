"""The examples of docs/howto/sklearn.md: scikit-learn estimators and functions for `datasets` on film reviews.

headstock data get rotten-tomatoes --to data
python benchmarks/estimators.py data > benchmarks/results/estimators.txt
"""

import sys

import pandas as pd
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

from headstock.huggingface import embed_batch, predict_batch, tokenize_batch
from headstock.sklearn import TextClassifier, TextEmbedder


def main(folder: str) -> None:
    train, test = pd.read_csv(f"{folder}/train.csv").sample(500, random_state=0), pd.read_csv(f"{folder}/test.csv")
    model = TextClassifier("reviews-en", freeze=True).fit(train["text"], train["label"])
    print("fine-tuned head", round(model.score(test["text"], test["label"]), 3))
    print(model.classes_, model.predict_proba(["A masterpiece.", "Dull and far too long."]).round(2).tolist())

    pipelines = {
        "embeddings": make_pipeline(TextEmbedder("reviews-en"), LogisticRegression(max_iter=1000)),
        "tf-idf": make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000)),
    }
    for name, pipeline in pipelines.items():
        print(name, cross_val_score(pipeline, train["text"], train["label"], cv=5).round(3).tolist())

    search = GridSearchCV(TextClassifier("reviews-en", freeze=True), {"pool": ["mean", "max"]}, cv=3)
    search.fit(train["text"], train["label"])
    print(search.best_params_, round(search.best_score_, 3))

    search.best_estimator_.save("runs/best", overwrite=True)
    dataset = Dataset.from_pandas(test.head(100), preserve_index=False)
    dataset = dataset.map(predict_batch("runs/best"), batched=True)
    dataset = dataset.map(embed_batch("reviews-en"), batched=True)
    dataset = dataset.map(tokenize_batch("reviews-en"), batched=True)
    print(dataset.column_names)
    print({name: value for name, value in dataset[0].items() if name not in ("embedding", "attention_mask")})


if __name__ == "__main__":
    main(sys.argv[1])
