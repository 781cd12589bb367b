"""The route among others: libraries that wrap the same methods, second copies of this package, reloads, processes."""

import contextlib
import copy
import functools
import importlib
import itertools
import multiprocessing
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from batches import ragged
from tiny import greedy, random_ids, tiny_target
from transformers import AutoConfig, AutoModel, GenerationConfig, Qwen3ForCausalLM
from transformers.generation import GenerationMixin, candidate_generator
from transformers.utils import output_capturing

import dspark_hf
from dspark_hf.decoding import route

METHODS = ["_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding"]


def installed():
    return {name: vars(GenerationMixin)[name] for name in METHODS}


@pytest.fixture
def stock():
    """transformers' own methods, with the route out."""
    dspark_hf.uninstall()
    methods = installed()
    before = dict(vars(GenerationMixin))
    yield methods
    for name, method in methods.items():
        setattr(GenerationMixin, name, method)
    dspark_hf.uninstall()
    assert dict(vars(GenerationMixin)) == before


class Foreign:
    """A library that wraps the same methods, and puts back what it found."""

    def __init__(self, *, keeps_names):
        self.keeps_names = keeps_names
        self.calls = 0

    def install(self):
        self.found = installed()
        for name, method in self.found.items():
            setattr(GenerationMixin, name, self.wrap(method))

    def wrap(self, method):
        def wrapper(*args, **kwargs):
            self.calls += 1
            return method(*args, **kwargs)

        return functools.wraps(method)(wrapper) if self.keeps_names else wrapper

    def uninstall(self):
        for name, method in self.found.items():
            setattr(GenerationMixin, name, method)


def speculates(target, drafter, ids, **kwargs):
    """Whether generate() runs our loop, which must then say what plain generation says."""
    output = greedy(target, ids, max_new_tokens=8, assistant_model=drafter, return_dict_in_generate=True, **kwargs)
    assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=8))
    return output.speculation.num_rounds > 0


ORDERS = [
    order
    for order in itertools.permutations(["ours on", "theirs on", "ours off", "theirs off"])
    if order.index("ours on") < order.index("ours off") and order.index("theirs on") < order.index("theirs off")
]


@pytest.mark.parametrize("keeps_names", [True, False], ids=["functools.wraps", "bare"])
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_another_library_in_every_order(stock, target, drafter, order, keeps_names):
    foreign = Foreign(keeps_names=keeps_names)
    actions = {
        "ours on": dspark_hf.install,
        "ours off": dspark_hf.uninstall,
        "theirs on": foreign.install,
        "theirs off": foreign.uninstall,
    }
    ids = random_ids(5)
    other_assistant = tiny_target(seed=1)
    expected = greedy(target, ids, max_new_tokens=8)
    active = set()
    for action in order:
        actions[action]()
        owner, state = action.split()
        active = active | {owner} if state == "on" else active - {owner}
        if action == "theirs off" and order[:2] == ("theirs on", "ours on"):
            dspark_hf.install()  # it put back what it found before us
        calls = foreign.calls
        assert torch.equal(greedy(target, ids, max_new_tokens=8, assistant_model=other_assistant), expected)
        assert (foreign.calls > calls) is ("theirs" in active)
        if "ours" in active:
            assert speculates(target, drafter, ids)
    dspark_hf.uninstall()  # a wrapper of ours that lay under theirs
    assert installed() == stock


@pytest.mark.parametrize("keeps_names", [True, False], ids=["functools.wraps", "bare"])
def test_installing_again_and_again_adds_no_wrapper(stock, keeps_names):
    def depth():
        """Frames between the call and the bottom."""
        frames = []

        def bottom(*args):
            frame = sys._getframe()
            while frame.f_code is not depth.__code__:
                frames.append(frame)
                frame = frame.f_back

        GenerationMixin.reached = bottom
        GenerationMixin._validate_generation_mode(None, None, None, {})
        del GenerationMixin.reached
        return len(frames)

    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        GenerationMixin.reached()

    GenerationMixin._validate_generation_mode = validate
    dspark_hf.install()
    foreign = Foreign(keeps_names=keeps_names)
    foreign.install()
    dspark_hf.install()
    once = depth()
    for _ in range(20):
        dspark_hf.uninstall()
        dspark_hf.install()
        dspark_hf.install()
    assert depth() == once


def test_two_wrappers_of_ours_around_another_are_both_switched_off(stock, target, drafter):
    dspark_hf.install()
    Foreign(keeps_names=False).install()
    dspark_hf.install()  # cannot see through a bare wrapper
    assert speculates(target, drafter, random_ids(5))
    dspark_hf.uninstall()
    assert not route.is_drafter(drafter)
    with pytest.raises(AttributeError, match="generation_config"):  # as any assistant that cannot generate
        greedy(target, random_ids(5), max_new_tokens=8, assistant_model=drafter)


def test_installing_from_many_threads_wraps_once(stock):
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(50):
            dspark_hf.install()
            dspark_hf.uninstall()
        dspark_hf.install()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dspark_hf.install()
    assert {name: method.__wrapped__ for name, method in installed().items()} == stock


@pytest.mark.parametrize("module", [dspark_hf, route], ids=lambda module: module.__name__)
def test_a_reload_wraps_nothing_twice_and_old_drafters_go_on(target, drafter, module):
    before = installed()
    importlib.reload(module)
    assert installed() == before
    assert speculates(target, drafter, random_ids(5))
    dspark_hf.uninstall()
    assert not any(hasattr(method, "__wrapped__") for method in installed().values())


# -- a second copy of the package -----------------------------------------------------------------------------------


@contextlib.contextmanager
def forgotten(name):
    """Afterwards the process is as if the package of this name had not been imported."""
    try:
        yield
    finally:
        dspark_hf.uninstall()
        if route_there := sys.modules.get(f"{name}.decoding.route"):
            route_there.uninstall()
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[module]
        AutoConfig.register("dspark", dspark_hf.DSparkConfig, exist_ok=True)
        AutoModel.register(dspark_hf.DSparkConfig, dspark_hf.DSparkDraftModel, exist_ok=True)


@pytest.fixture
def copy_name(tmp_path, monkeypatch):
    """The name of a copy of the source, as remote code or a vendored package brings it; not imported yet."""
    ignore = shutil.ignore_patterns("__pycache__", "bundled", "data")
    shutil.copytree(Path(dspark_hf.__file__).parent, tmp_path / "dspark_vendored", ignore=ignore)
    monkeypatch.syspath_prepend(tmp_path)
    with forgotten("dspark_vendored"):
        yield "dspark_vendored"


def same_drafter(package, target, drafter):
    """The drafter again, of the other copy's class."""
    config = package.DSparkConfig.from_target(target.config, num_hidden_layers=2, block_size=4, markov_rank=8)
    again = package.DSparkDraftModel(config).eval()
    again.load_state_dict(drafter.state_dict())
    return again


@pytest.mark.parametrize("wrapper", ["ours", "the copy's"])
def test_drafters_of_two_copies_run_through_either_wrapper(copy_name, target, drafter, wrapper):
    before = installed()
    second = importlib.import_module(copy_name)
    assert installed() == before
    if wrapper != "ours":
        dspark_hf.uninstall()
        second.uninstall()
        second.install()
        assert all(method.__globals__["__name__"] == f"{copy_name}.decoding.route" for method in installed().values())
        dspark_hf.install()
    theirs = same_drafter(second, target, drafter)
    assert not isinstance(theirs, dspark_hf.DSparkDraftModel)
    options = {"max_new_tokens": 20, "return_dict_in_generate": True}
    got = [greedy(target, random_ids(7), assistant_model=one, **options) for one in (drafter, theirs)]
    expected = greedy(target, random_ids(7), max_new_tokens=20)
    assert all(torch.equal(output.sequences, expected) for output in got)
    # a draft accepted twice would show in the counts
    counts = [(out.speculation.num_rounds, out.speculation.num_new_tokens, out.speculation.num_calls) for out in got]
    assert counts[0] == counts[1]
    assert counts[0][1:] == (20, 1)
    batch = ragged([3, 9])  # as a stream, of which the attention must hear from either copy
    wanted = greedy(target, **batch, max_new_tokens=8)
    for one in (drafter, theirs):
        assert torch.equal(greedy(target, **batch, max_new_tokens=8, assistant_model=one), wanted)
    second.uninstall()
    assert speculates(target, drafter, random_ids(5))
    dspark_hf.uninstall()
    assert not any(hasattr(method, "__wrapped__") for method in installed().values())


def test_a_folder_loads_as_the_copy_that_registered_last(copy_name, target, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    second = importlib.import_module(copy_name)
    loaded = AutoModel.from_pretrained(tmp_path / "drafter").eval()
    assert type(loaded) is second.DSparkDraftModel
    assert speculates(target, loaded, random_ids(7))


def test_a_class_that_transformers_has_moved_is_one_clear_error(copy_name, monkeypatch, target):
    monkeypatch.delattr(candidate_generator, "CandidateGenerator")
    with pytest.raises(ImportError, match=r"lacks a name .*CandidateGenerator.*pip install") as caught:
        importlib.import_module(copy_name)
    assert type(caught.value).__name__ == "UnsupportedTransformersError"
    assert greedy(target, random_ids(5), max_new_tokens=4).shape == (1, 9)


# -- classes that override ------------------------------------------------------------------------------------------


def of_class(cls):
    target = tiny_target()
    target.__class__ = cls
    return target


def test_a_target_that_adds_to_generate_and_to_the_loop_still_speculates(drafter):
    calls = []

    class Adds(Qwen3ForCausalLM):
        def generate(self, *args, **kwargs):
            calls.append("generate")
            return super().generate(*args, **kwargs)

        def _assisted_decoding(self, *args, **kwargs):
            calls.append("loop")
            return super()._assisted_decoding(*args, **kwargs)

    assert speculates(of_class(Adds), drafter, random_ids(5))
    assert calls == ["generate", "loop", "generate"]


def test_a_target_with_a_loop_of_its_own_gets_our_drafts(drafter):
    original = GenerationMixin._assisted_decoding.__wrapped__

    class OwnLoop(Qwen3ForCausalLM):
        def _assisted_decoding(self, *args, **kwargs):
            return original(self, *args, **kwargs)

    target, ids = of_class(OwnLoop), random_ids(5)
    output = greedy(target, ids, max_new_tokens=8, assistant_model=drafter, return_dict_in_generate=True)
    assert not hasattr(output, "speculation")
    assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=8))


def test_a_target_that_validates_in_its_own_way_is_asked_nevertheless(drafter):
    class ValidatesNothing(Qwen3ForCausalLM):
        def _validate_generation_mode(self, *args, **kwargs):
            pass

    target = of_class(ValidatesNothing)
    assert speculates(target, drafter, random_ids(5))
    with pytest.raises(dspark_hf.UnsupportedGenerationError, match="prompt_lookup_num_tokens=3"):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter, prompt_lookup_num_tokens=3)


# -- copies, files and processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_models_are_copied_and_pickled_while_the_route_is_in(target, drafter, again):
    assert speculates(again(target), again(drafter), random_ids(5))


def test_a_target_of_a_class_never_constructed_here_shows_its_hidden_states(target, drafter, monkeypatch):
    """What a process is in that was sent its models in a pickle."""
    empty = type(output_capturing._CAN_RECORD_REGISTRY)()
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", empty)
    assert speculates(target, drafter, random_ids(5))


def test_a_saved_policy_is_read_without_the_package(stock, target, tmp_path):
    GenerationConfig(verification_policy="threshold", max_new_tokens=6).save_pretrained(tmp_path)
    assert not hasattr(GenerationConfig, "verification_policy")
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.verification_policy == "threshold"
    expected = greedy(target, random_ids(5), max_new_tokens=6)
    assert torch.equal(target.generate(random_ids(5), generation_config=config), expected)
    target.generation_config = config
    assert torch.equal(target.generate(random_ids(5)), expected)
    with pytest.raises(ValueError, match="verification_policy"):  # an argument is not a file: it is not known now
        greedy(tiny_target(), random_ids(5), max_new_tokens=4, verification_policy="full")


@pytest.mark.full  # another interpreter imports transformers
def test_a_saved_policy_is_read_by_a_process_that_never_saw_the_package(target, tmp_path):
    target.generation_config = GenerationConfig(verification_policy="threshold", max_new_tokens=6)
    target.save_pretrained(tmp_path)
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model.generation_config.verification_policy, model.generate(torch.tensor([[1, 2, 3]])).shape)\n"
        "assert 'dspark_hf' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "threshold torch.Size([1, 9])"


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.full), pytest.param("forkserver", marks=pytest.mark.full)],
)
def test_a_child_process_that_is_sent_a_drafter_speculates(target, drafter, method):
    ids = random_ids(5)
    # What is sent is pickled, and the drafter's class brings the package and its route along.
    options = {"do_sample": False, "max_new_tokens": 8, "assistant_model": drafter, "return_dict_in_generate": True}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        output = pool.submit(target.generate, ids, **options).result(timeout=300)
    assert output.speculation.num_rounds > 0
    assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=8))
