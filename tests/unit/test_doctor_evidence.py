"""Intervals that decide in `dspark doctor`: Student's over prompts, wide where prompts are few."""

import numpy as np
import pytest

from dspark_hf.evaluation.doctor.evidence import LEVEL, jackknife, student_quantile


def ratio(sums):
    return sums["a"] / sums["b"]


@pytest.mark.parametrize("degrees", [2, 4, 7, 30])
@pytest.mark.parametrize("probability", [0.975, 0.995, 0.9995])
def test_quantiles_are_those_of_student(degrees, probability):
    stats = pytest.importorskip("scipy.stats")
    assert student_quantile(degrees, probability) == pytest.approx(stats.t.ppf(probability, degrees), rel=0.03)


def test_of_a_mean_it_is_the_textbook_interval():
    values = [0.3, 0.5, 0.1, 0.9, 0.4]
    found = jackknife({"a": values, "b": [1.0] * 5}, ratio, num_drafts=20)
    reach = student_quantile(4, 1 - (1 - LEVEL) / 2) * np.std(values, ddof=1) / np.sqrt(5)
    assert found.value == pytest.approx(np.mean(values))
    assert (found.high - found.low) / 2 == pytest.approx(reach)
    assert (found.num_prompts, found.num_drafts, found.level) == (5, 20, LEVEL)


def test_more_comparisons_widen_it_and_decide_less():
    columns = {"a": [0.3, 0.5, 0.2, 0.6, 0.4], "b": [1.0] * 5}
    one, many = (jackknife(columns, ratio, num_drafts=20, num_comparisons=n) for n in (1, 100))
    assert one.low > many.low and many.level == pytest.approx(1 - (1 - LEVEL) / 100)
    assert one.is_above_zero and not many.is_above_zero


def test_a_few_prompts_settle_nothing():
    alone = jackknife({"a": [3.0], "b": [1.0]}, ratio, num_drafts=4)
    assert alone.value == 3.0 and alone.low is None and not alone.is_above_zero
    assert "too few prompts for an interval" in alone.told("tokens")
    undefined = jackknife({"a": [0.0, 0.0], "b": [0.0, 0.0]}, ratio, num_drafts=0)
    assert undefined.value is None and not undefined.is_above_zero and "undefined" in undefined.told("tokens")
    one_sided = jackknife({"a": [3.0, 0.0], "b": [1.0, 0.0]}, ratio, num_drafts=4)  # without the first, 0 / 0
    assert one_sided.value == 3.0 and one_sided.low is None


def test_noise_around_zero_is_rarely_taken_for_something():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(2000, 8))
    wrong = sum(jackknife({"a": list(d), "b": [1.0] * 8}, ratio, num_drafts=8).is_above_zero for d in draws)
    assert wrong / 2000 < 0.5 * (1 - LEVEL) + 4 * (0.005 * 0.995 / 2000) ** 0.5
