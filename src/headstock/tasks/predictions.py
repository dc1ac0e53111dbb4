"""What a model predicts for one row. Each labelled task has a class of its own; see `LabelledTask.prediction_class`."""

from dataclasses import dataclass
from typing import Any

from headstock.results import Result


class Prediction(Result):
    """The prediction for one row: a class, tags, an answer, a number or a translation."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Prediction":
        """The prediction with these values, as `LabelledTask.predictions` returns them."""
        return cls(**values)


@dataclass(frozen=True, eq=False)
class UntypedPrediction(Prediction):
    """The prediction of a task without a class of its own."""

    content: dict[str, Any]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "UntypedPrediction":
        return cls(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)
