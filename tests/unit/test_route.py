"""Installing and removing the route, and that every other assistant goes its old way."""

import functools
import inspect

import pytest
import torch
from tiny import greedy, random_ids, tiny_drafter, tiny_target
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

import dspark_hf
from dspark_hf import UnsupportedTransformersError, _compat

METHODS = ["_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding"]


def installed():
    return [getattr(GenerationMixin, name) for name in METHODS]


def test_install_is_idempotent_and_uninstall_restores():
    before = installed()
    dspark_hf.install()
    assert installed() == before
    dspark_hf.uninstall()
    originals = installed()
    assert all(method.__module__ == "transformers.generation.utils" for method in originals)
    assert not any(hasattr(method, "__wrapped__") for method in originals)
    assert not hasattr(GenerationConfig(), "verification_policy")
    dspark_hf.uninstall()
    assert installed() == originals
    dspark_hf.install()
    assert [method.__wrapped__ for method in installed()] == originals


def test_wrappers_keep_names_and_signatures():
    for name, method in zip(METHODS, installed(), strict=True):
        assert method.__name__ == name
        assert inspect.signature(method) == inspect.signature(method.__wrapped__)


def test_a_library_that_wraps_on_top_survives_uninstall(monkeypatch):
    ours = GenerationMixin._assisted_decoding
    calls = []

    @functools.wraps(ours)
    def on_top(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", on_top)
    target, ids = tiny_target(), random_ids(5)
    expected = greedy(target, ids, max_new_tokens=6)
    assert torch.equal(greedy(target, ids, max_new_tokens=6, assistant_model=tiny_drafter(target)), expected)
    dspark_hf.uninstall()
    assert GenerationMixin._assisted_decoding is on_top
    assert torch.equal(greedy(target, ids, max_new_tokens=6, assistant_model=tiny_target(seed=1)), expected)
    dspark_hf.install()
    assert GenerationMixin._assisted_decoding is on_top
    assert torch.equal(greedy(target, ids, max_new_tokens=6, assistant_model=tiny_drafter(target)), expected)
    assert len(calls) == 3


def test_other_assistants_and_plain_generation_are_untouched():
    target, ids = tiny_target(), random_ids(5)
    options = [{}, {"assistant_model": tiny_target(seed=1)}, {"prompt_lookup_num_tokens": 2}]
    with_route = [greedy(target, ids, max_new_tokens=12, **o) for o in options]
    dspark_hf.uninstall()
    without = [greedy(target, ids, max_new_tokens=12, **o) for o in options]
    assert all(torch.equal(a, b) for a, b in zip(with_route, without, strict=True))


def test_a_drafter_is_told_by_its_marker_not_its_class():
    target, ids = tiny_target(), random_ids(5)
    drafter = tiny_drafter(target)

    class Remote(torch.nn.Module):
        """What a copy loaded with trust_remote_code looks like: another class with the same contents."""

        is_dspark_drafter = True

        def __getattr__(self, name):
            return getattr(drafter, name)

        def __call__(self, *args, **kwargs):
            return drafter(*args, **kwargs)

    output = greedy(target, ids, max_new_tokens=6, assistant_model=Remote(), return_dict_in_generate=True)
    assert output.speculation.num_rounds > 0


def test_a_generation_config_carries_the_policy(tmp_path):
    config = GenerationConfig(verification_policy="threshold", max_new_tokens=6)
    config.save_pretrained(tmp_path)
    again = GenerationConfig.from_pretrained(tmp_path)
    assert again.verification_policy == "threshold"
    target = tiny_target()
    greedy_config = GenerationConfig(verification_policy="best", max_new_tokens=6)
    with pytest.raises(ValueError, match="verification_policy must be one of"):
        target.generate(random_ids(5), generation_config=greedy_config, assistant_model=tiny_drafter(target))


def test_a_missing_method_or_parameter_names_the_versions_that_work(monkeypatch):
    monkeypatch.setitem(_compat.REQUIRED_PARAMETERS, "_assisted_decoding", frozenset({"renamed"}))
    with pytest.raises(UnsupportedTransformersError, match=r"'renamed'.*transformers>=5.24,<6"):
        dspark_hf.install()
    monkeypatch.setitem(_compat.REQUIRED_PARAMETERS, "_gone", frozenset())
    with pytest.raises(UnsupportedTransformersError, match="_gone"):
        _compat.wrapped_method("_gone")


def test_unknown_generate_arguments_still_fail():
    target = tiny_target()
    with pytest.raises(ValueError, match="verification_polcy"):
        greedy(
            target,
            random_ids(5),
            max_new_tokens=4,
            assistant_model=tiny_drafter(target),
            verification_polcy="full",
        )
