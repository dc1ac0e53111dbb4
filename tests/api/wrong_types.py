"""A user's script with a mistake in every marked line, which type checkers must refuse."""

import headstock

run = headstock.finetune("reviews-en", train="train.csv", out="runs/x", epochs="three")  # wrong
run = headstock.finetune("reviews-en", train="train.csv", out="runs/x", epoch=3)  # wrong
run = headstock.pretrain("corpus.txt", out="runs/x", norm="before")  # wrong
run = headstock.pretrain(17, out="runs/x")  # wrong
run.accuracy  # wrong  # noqa: B018
headstock.pretrian  # wrong  # noqa: B018
headstock.load("runs/x", devcie="cpu")  # wrong
pipeline = headstock.load("runs/x")
prediction = pipeline.predict("text")[0]
prediction.label  # wrong  # noqa: B018
pipeline.translate("a", beam=4)  # wrong
comparison = headstock.compare("reviews-en", out="runs/c", labels="100")  # wrong
