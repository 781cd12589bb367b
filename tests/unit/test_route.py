"""Installing and removing the route, and that every other assistant goes its old way."""

import functools
import importlib.metadata
import inspect

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
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


def loop(
    self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
    inputs_tensor=None, assistant_model=None, assistant_tokenizer=None, tokenizer=None, **model_kwargs,
):  # fmt: skip
    """What the route knows how to call."""


def with_parameters(change):
    """`loop` with another signature."""
    signature = inspect.signature(loop)

    def changed(*args, **kwargs):
        return loop(*args, **kwargs)

    changed.__signature__ = signature.replace(parameters=change(list(signature.parameters.values())))
    return changed


def renamed(parameters):
    return [p.replace(name="helper_model") if p.name == "assistant_model" else p for p in parameters]


def with_a_new_one(parameters):
    return [*parameters[:3], inspect.Parameter("planner", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters[3:]]


def in_another_order(parameters):
    return [parameters[0], parameters[2], parameters[1], *parameters[3:]]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (None, "has no GenerationMixin._assisted_decoding;"),
        (with_parameters(renamed), r"with the parameters \['assistant_model'\]"),
        (with_parameters(with_a_new_one), r"requires \['planner'\]"),
        (with_parameters(in_another_order), "in another order"),
    ],
    ids=["gone", "renamed", "new and required", "another order"],
)
def test_another_signature_is_one_clear_error_and_leaves_transformers_alone(monkeypatch, method, message):
    dspark_hf.uninstall()
    target, assistant, ids = tiny_target(), tiny_target(seed=1), random_ids(5)
    expected = greedy(target, ids, max_new_tokens=6)
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_assisted_decoding", method)
        before = installed()
        with pytest.raises(
            UnsupportedTransformersError, match=message + r".*pip install .transformers>=5.24,<6"
        ) as caught:
            dspark_hf.install()
        assert transformers.__version__ in str(caught.value)
        assert installed() == before
        assert torch.equal(greedy(target, ids, max_new_tokens=6), expected)
    assert torch.equal(greedy(target, ids, max_new_tokens=6, assistant_model=assistant), expected)


@pytest.mark.parametrize(
    "method",
    [loop, with_parameters(lambda p: [*p[:-1], p[-2].replace(name="planner"), p[-1]]), lambda *args, **kwargs: None],
    ids=["known", "new and optional", "another library's wrapper that takes anything"],
)
def test_signatures_that_can_be_called_are_accepted(monkeypatch, method):
    dspark_hf.uninstall()
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_assisted_decoding", method)
        dspark_hf.install()
        assert GenerationMixin._assisted_decoding.__wrapped__ is method
        dspark_hf.uninstall()
        assert GenerationMixin._assisted_decoding is method


@pytest.mark.parametrize("version", ["5.23.9", "4.57.0", "5.24.0.dev0", "5.24.0", "5.31.2", "6.0.0", "7.1"])
def test_an_older_release_is_refused_and_a_newer_one_is_tried(monkeypatch, version, caplog):
    monkeypatch.setattr(_compat.transformers, "__version__", version)
    if version < "5.24":
        with pytest.raises(UnsupportedTransformersError, match=f"transformers {version} is too old.*pip install"):
            _compat.check_version()
    else:
        _compat.check_version()
    assert ("newer than what dspark_hf was tested with" in caplog.text) is (version >= "6")


def test_a_name_that_transformers_lacks_is_told_from_other_import_errors():
    with pytest.raises(UnsupportedTransformersError, match=r"lacks a name .*NoSuchModel"), _compat.naming_the_version():
        from transformers import NoSuchModel  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), _compat.naming_the_version():
        import no_such_package  # noqa: F401


def test_pip_is_told_the_range_that_the_route_names():
    requirements = map(Requirement, importlib.metadata.requires("dspark-hf"))
    [specifier] = [requirement.specifier for requirement in requirements if requirement.name == "transformers"]
    assert specifier == SpecifierSet(_compat.SUPPORTED_TRANSFORMERS)


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
