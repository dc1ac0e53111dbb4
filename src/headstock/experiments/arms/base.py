"""The interface of an arm's kind: how a comparison obtains a model from labelled rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headstock.data.records import Records
from headstock.experiments.grid import TrialResult
from headstock.registry import Registry
from headstock.train.callbacks import Callback
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings
    from headstock.experiments.compare_trials import ExperimentContext, GridPoint


class ArmKind:
    """A way to obtain a model. Adding one takes one new file in this package."""

    name: ClassVar[str]
    title: ClassVar[str]  # in a verdict, such as "the frozen backbone"
    needs_run: ClassVar[bool] = True  # a pretrained run; the arm is repeated for each
    uses_weights: ClassVar[bool] = True  # of the run, not only its architecture
    is_finetuned: ClassVar[bool] = False  # by the training loop, so that fine-tuning settings apply
    options: ClassVar[Mapping[str, Any]] = {}  # fine-tuning settings that the kind implies
    defaults: ClassVar[Mapping[str, Any]] = {}  # fine-tuning settings that only arms of this kind have
    ignored: ClassVar[frozenset[str]] = frozenset()  # settings for all arms that do not apply to this kind

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        """Why the kind does not apply to the task of a comparison; None if it does."""
        return None

    @classmethod
    def check_settings(cls, name: str, table: Mapping[str, Any]) -> None:
        """Reject settings of the arm `name` that the kind does not have; those of fine-tuning are checked later."""

    @classmethod
    def run_trial(
        cls,
        context: "ExperimentContext",
        point: "GridPoint",
        run_config: RunConfig | None,
        train: Records,
        valid: Records,
        callbacks: Sequence[Callback],
    ) -> TrialResult:
        """Obtain a model from the training and validation rows, and evaluate it on the context's rows.

        `run_config` is the fine-tuning config, None unless `is_finetuned`.
        """
        raise NotImplementedError


ARM_KINDS: Registry[type[ArmKind]] = Registry("kind of arm", __package__)
