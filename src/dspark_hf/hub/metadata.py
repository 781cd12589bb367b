"""The YAML block of a card: what the Hub indexes."""

from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCardData

from ..evaluation.scrub import scrub_any
from .markdown import one_line
from .report_views import Metric

LIBRARY = "dspark-hf"
TAGS = ("speculative-decoding", "dspark", "draft-model")
PIPELINE = "text-generation"


def metadata_block(
    name: str,
    *,
    base_model: str | None,
    license_id: str | None,
    datasets: list[str],
    metrics: list[Metric],
    tags: Sequence[str] = (),
) -> str:
    """Front matter with its fences.

    Args:
        name: Of the drafter.
        base_model: Hub id of the target.
        license_id: As the Hub spells it.
        datasets: Hub ids.
        metrics: For model-index.
        tags: Besides those of every drafter.
    """
    data = ModelCardData(
        library_name=LIBRARY,
        base_model=base_model,
        license=license_id,
        pipeline_tag=PIPELINE,
        tags=list(dict.fromkeys([*TAGS, *map(_plain, tags)])),
        datasets=datasets or None,
        model_name=_plain(name) if metrics else None,
        eval_results=[_result(metric) for metric in metrics] or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _result(metric: Metric) -> EvalResult:
    name = _plain(metric.data_set)
    return EvalResult(
        task_type=PIPELINE,
        dataset_type=name,
        dataset_name=name,
        metric_type=metric.type,
        metric_name=_plain(metric.name),
        metric_value=metric.value,
        metric_args={key: _plain(value) if isinstance(value, str) else value for key, value in metric.args.items()},
    )


def _plain(text: str) -> str:
    """One line: a line break followed by `---` would end the block."""
    return one_line(scrub_any(text))
