"""Profiles in the cache: found for the pair and machine they are of, refused or passed over otherwise."""

import gc
import json
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from throughput_machines import FINGERPRINT, StaircaseMachine, profile_of
from tiny import tiny_drafter, tiny_target

from dspark_hf import ThroughputProfileError
from dspark_hf.fitting import profile_store
from dspark_hf.fitting.fingerprint import Fingerprint
from dspark_hf.fitting.profile_store import (
    command_for,
    find_profile,
    load_profile,
    profile_path,
    renewal_command,
    save_profile,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def pair():
    target = tiny_target(num_layers=3)
    return target, tiny_drafter(target)


def made_for(pair, **changes):
    """A profile that was measured for this pair, or for one whose fingerprint differs by `changes`."""
    return profile_of(StaircaseMachine(), fingerprint=replace(Fingerprint.of(*pair), **changes))


def older_versions():
    return FINGERPRINT.versions | {"torch": "1.0"}


# --- fingerprints


def test_a_fingerprint_is_of_what_costs_time(pair):
    target, drafter = pair
    own = Fingerprint.of(target, drafter)
    assert own == Fingerprint.of(tiny_target(num_layers=3, seed=5), tiny_drafter(target, seed=6))  # other weights
    assert Fingerprint.of(tiny_target("llama", num_layers=3), drafter).target != own.target
    assert Fingerprint.of(tiny_target(num_layers=3, vocab_size=64), drafter).target != own.target
    for changes in ({"block_size": 3}, {"markov_head_type": "gated"}, {"num_hidden_layers": 1}):
        assert Fingerprint.of(target, tiny_drafter(target, **changes)).drafter != own.drafter
    drafter.config.verification_policy = "threshold"
    target.config.pad_token_id = 3
    assert Fingerprint.of(target, drafter) == own
    in_half = Fingerprint.of(target.to(torch.bfloat16), drafter)
    assert (in_half.dtype, in_half.drafter) == ("bfloat16", own.drafter)
    assert in_half.target != own.target


def test_versions_do_not_move_the_file_and_all_else_does():
    assert replace(FINGERPRINT, versions=older_versions()).key == FINGERPRINT.key
    others = [{name: "other"} for name in ("device", "dtype", "target", "drafter", "layout")] + [{"num_threads": 9}]
    assert len({replace(FINGERPRINT, **change).key for change in others} | {FINGERPRINT.key}) == 7


# --- files


def test_a_saved_profile_is_loaded(cache):
    profile = profile_of(StaircaseMachine())
    path = save_profile(profile)
    assert path == profile_path(FINGERPRINT)
    assert path.parent == cache / "profiles"
    assert load_profile(path, FINGERPRINT).to_dict() == profile.to_dict()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_older_profile():
    profile = profile_of(StaircaseMachine())
    path = save_profile(profile)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_profile(replace(profile, provenance={"broken": object()}))
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


RENEW = (
    "renew it with `dspark profile --target owner/target --drafter 'my drafter' --batch-size 1 --batch-size 2 "
    "--batch-size 4 --context 10 --context 30 --dtype float32 --device cpu --threads 2`"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda: H"}, "of something else .*device: cpu: fake, cuda: H"),
        ({"dtype": "bfloat16"}, "dtype: float32, bfloat16"),
        ({"target": "cccc"}, "target: aaaa, cccc"),
        ({"drafter": "dddd"}, "drafter: bbbb, dddd"),
        ({"layout": "packed"}, "layout: padded, packed"),
        ({"num_threads": 8}, "num_threads: 2, 8"),
        ({"versions": older_versions()}, r"stale: versions have changed .*\(torch: 2, 1.0\)"),
    ],
)
def test_foreign_and_stale_profiles_are_refused(change, message):
    path = save_profile(profile_of(StaircaseMachine()))
    with pytest.raises(ThroughputProfileError, match=message) as caught:
        load_profile(path, replace(FINGERPRINT, **change))
    assert RENEW in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"format_version": 1}', "\udcff"])
def test_damaged_files_are_refused(text):
    path = save_profile(profile_of(StaircaseMachine()))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ThroughputProfileError, match="is damaged, .*make a new one with `dspark profile`"):
        load_profile(path, FINGERPRINT)


def test_the_default_drafter_and_an_accelerator_need_no_options():
    fingerprint = replace(FINGERPRINT, num_threads=None, device="cuda: H")
    command = renewal_command(profile_of(StaircaseMachine(), drafter=None, fingerprint=fingerprint))
    assert "--drafter" not in command
    assert "--threads" not in command
    assert "--device cuda" in command


def test_a_command_names_dtypes_that_it_takes():
    command = renewal_command(profile_of(StaircaseMachine(), fingerprint=replace(FINGERPRINT, dtype="float16")))
    assert "--dtype auto" in command


def test_the_command_for_a_loaded_pair_names_it(pair):
    target, drafter = pair
    rest = f"--dtype float32 --device cpu --threads {torch.get_num_threads()}"
    assert command_for(target, drafter) == f"dspark profile --target TARGET --drafter DRAFTER {rest}"
    target.config._name_or_path, drafter.config._name_or_path = "owner/target", "my drafter"
    expected = f"dspark profile --target owner/target --drafter 'my drafter' --batch-size 1 --batch-size 64 {rest}"
    assert command_for(target, drafter, (1, 64)) == expected


# --- finding


def test_without_a_profile_none_is_found(pair, caplog):
    assert find_profile(*pair) is None
    assert not caplog.records


def test_a_profile_is_found_and_read_once(pair, monkeypatch):
    save_profile(made_for(pair))
    found = find_profile(*pair)
    assert found.step_s(1, 2, 10) > 0
    monkeypatch.setattr(Fingerprint, "of", lambda *_: pytest.fail("the fingerprint was taken again"))
    monkeypatch.setattr(profile_store, "load_profile", lambda *_: pytest.fail("the file was read again"))
    assert find_profile(*pair) is found


def test_a_renewed_or_removed_profile_is_noticed(pair):
    assert find_profile(*pair) is None
    path = save_profile(made_for(pair))
    first = find_profile(*pair)
    save_profile(replace(made_for(pair), num_repeats=77))
    second = find_profile(*pair)
    assert (first.num_repeats, second.num_repeats) == (3, 77)
    path.unlink()
    assert find_profile(*pair) is None


def test_a_changed_pair_has_another_profile(pair):
    target, drafter = pair
    save_profile(made_for(pair))
    assert find_profile(target, drafter) is not None
    assert find_profile(target, tiny_drafter(target, block_size=2)) is None
    target.to(torch.bfloat16)
    assert find_profile(target, drafter) is None
    target.to(torch.float32)
    assert find_profile(target, drafter) is not None


def test_changes_inside_a_pair_are_noticed(pair):
    target, drafter = pair
    save_profile(made_for(pair))
    assert find_profile(target, drafter) is not None
    drafter.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    assert find_profile(target, drafter) is None
    del drafter.extra
    assert find_profile(target, drafter) is not None
    target.resize_token_embeddings(target.config.vocab_size + 3)
    assert find_profile(target, drafter) is None


def test_threads_tell_profiles_apart(pair):
    own = torch.get_num_threads()
    save_profile(made_for(pair))
    torch.set_num_threads(own + 1)
    try:
        assert find_profile(*pair) is None
    finally:
        torch.set_num_threads(own)
    assert find_profile(*pair) is not None


@pytest.mark.parametrize("kind", ["stale", "damaged", "infinite", "unversioned"])
def test_an_unusable_profile_is_said_once_and_not_used(pair, kind, caplog):
    path = save_profile(made_for(pair, versions=older_versions()))
    if kind == "damaged":
        path.write_text("{")
    content = json.loads(save_profile(made_for(pair), path.with_name("other")).read_text())
    if kind == "infinite":
        path.write_text(json.dumps(content | {"num_repeats": float("inf")}))
    if kind == "unversioned":
        content["fingerprint"]["versions"] = []
        path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert find_profile(*pair) is None
        assert find_profile(*pair) is None
        assert find_profile(pair[0], tiny_drafter(pair[0])) is None  # loaded again
    (record,) = caplog.records
    assert ("stale" if kind == "stale" else "damaged") in record.getMessage()
    assert "dspark profile" in record.getMessage()


def test_found_profiles_keep_no_model_alive():
    target = tiny_target(num_layers=3)
    drafter = tiny_drafter(target)
    save_profile(made_for((target, drafter)))
    assert find_profile(target, drafter) is not None
    ghosts = [weakref.ref(target), weakref.ref(drafter)]
    del target, drafter
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]


def test_the_file_tells_people_what_it_is(cache):
    content = json.loads(save_profile(profile_of(StaircaseMachine())).read_text())
    assert content["target"] == "owner/target"
    assert content["curve_shapes"][0]["num_steps"] == 3
    assert content["provenance"] == {"seed": 0}
