"""Secrets, homes and user names do not get into reports."""

import getpass
import json
import shlex
import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark_hf.evaluation import provenance
from dspark_hf.evaluation.scrub import SECRET, scrub, scrub_all, scrub_any, scrub_arguments

QUICK = settings(deadline=None, max_examples=40)  # a busy machine is no failure
SECRET_CHARACTERS = string.ascii_letters + string.digits
# Long enough that none is part of another text by chance.
secrets = st.text(SECRET_CHARACTERS, min_size=20, max_size=40)
# What a password may hold besides.
passwords = st.text(SECRET_CHARACTERS + "$%&?!.,;:+*#|<>()[]{} =-'\"\\`", min_size=12, max_size=30).filter(str.strip)
surroundings = st.text(string.ascii_letters + string.digits + " /.,:;=-_'\"", max_size=20)
names = st.sampled_from(["token", "hf-token", "password", "api-key", "access_key", "client-secret", "HF_TOKEN"])


@pytest.mark.parametrize(
    "shape",
    ["hf_{}", "sk-{}", "sk-proj-{}", "ghp_{}", "github_pat_{}", "Bearer {}", "Authorization: Basic {}", "xoxb-{}"],
)
@QUICK
@given(secret=secrets, before=surroundings, after=surroundings)
def test_secrets_of_known_shapes_are_taken_out(shape, secret, before, after):
    assume(secret not in before and secret not in after)
    assert secret not in scrub_any(f"{before} {shape.format(secret)} {after}")


@QUICK
@given(user=secrets, password=secrets, before=surroundings)
def test_credentials_in_addresses_are_taken_out(user, password, before):
    assume(user not in before and password not in before)
    scrubbed = scrub_any(f"{before} https://{user}:{password}@example.org/data@v1")
    assert user not in scrubbed and password not in scrubbed
    assert scrubbed.endswith(f"https://{SECRET}@example.org/data@v1")


@QUICK
@given(name=names, secret=passwords, is_joined=st.booleans())
def test_values_of_secret_options_are_taken_out(name, secret, is_joined):
    arguments = [f"--{name}={secret}"] if is_joined else [f"--{name}", secret]
    arguments = ["dspark", *arguments, "--output", "out"]
    scrubbed = scrub_any(shlex.join(scrub_arguments(arguments)))
    assert secret.strip() not in scrubbed
    assert scrubbed.startswith("dspark ") and scrubbed.endswith("--output out")


@QUICK
@given(name=names, secret=secrets)
def test_values_of_secret_options_are_taken_out_of_texts(name, secret):
    for text in (f"--{name} {secret} x", f"--{name}='{secret}' x", f'-{name} "{secret}" x'):
        assert secret not in scrub_any(text) and scrub_any(text).endswith(" x")


@QUICK
@given(secret=secrets)
def test_assignments_and_json_are_taken_out(secret):
    for text in (f"MY_API_KEY={secret} x", f"db_password: '{secret}'", json.dumps({"token": secret, "n": 1})):
        assert secret not in scrub_any(text)


@QUICK
@given(user=st.text(string.ascii_lowercase, min_size=1, max_size=10), rest=st.sampled_from(["", "/x", "/x y.json"]))
def test_homes_of_any_user_are_taken_out(user, rest):
    for home in (f"/home/{user}", f"/Users/{user}", f"C:\\Users\\{user}", f"file:///home/{user}"):
        assert scrub_any(f"--output {home}{rest}").replace("file://", "") == f"--output ~{rest}"


@QUICK
@given(st.text(max_size=200))
def test_scrubbing_twice_is_scrubbing_once(text):
    assert scrub_any(scrub_any(text)) == scrub_any(text)


@pytest.mark.parametrize(
    "text",
    [
        "dspark train --max-new-tokens 64 --num-assistant-tokens=5 --max-prompt-tokens 1024",
        "tokenizer = AutoTokenizer.from_pretrained('org/name')",
        "pad_token_id=2 eos_token_id: 2",
        "first_token_s_p50: seconds to the first token, prefill_token_ms=3.1",
        "1.75 tokens: the bonus token counted; secretary",
        "/data/rooted/x ./root.txt org/name --prompts eval/gsm8k.jsonl",
        "risk-averse-and-long-enough",
    ],
)
def test_what_is_no_secret_stays(text):
    assert scrub_any(text) == text


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/root/x /root '/root'", "~/x ~ '~'"),
        ("--output=/root", "--output=~"),
        ("~ann/x", "~/x"),
        ("'/home/some body/x'", "'~ body/x'"),
    ],
)
def test_homes_that_are_written_in_other_ways(text, scrubbed):
    assert scrub_any(text) == scrubbed


def test_a_text_under_a_secrets_name_is_a_secret():
    content = {"hub_token": "plain", "nested": [{"API_KEY": "plain", "num_tokens": "7", "token_count": 3}]}
    assert scrub_all(content) == {
        "hub_token": SECRET,
        "nested": [{"API_KEY": SECRET, "num_tokens": "7", "token_count": 3}],
    }


def test_this_users_name_is_taken_out_of_paths_and_addresses(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "annabel")
    assert scrub("/scratch/annabel/x annabel@host annabelle /data/annabel-2") == (
        "/scratch/USER/x USER@host annabelle /data/annabel-2"
    )


@pytest.mark.parametrize("name", ["root", "al", "test"])
def test_names_that_say_nothing_stay(monkeypatch, name):
    monkeypatch.setattr(getpass, "getuser", lambda: name)
    assert scrub(f"/scratch/{name}/x") == f"/scratch/{name}/x"


def test_a_user_without_a_name_is_no_error(monkeypatch):
    def fail():
        raise KeyError("uid 12345")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert scrub("/scratch/x") == "/scratch/x"


def test_reports_are_scrubbed_wherever_a_text_stands(tmp_path):
    content = {"a": ["/home/ann/x", 1, None], "/home/ann/y": {"b": ("hf_abcdefghijkl", True)}}
    assert scrub_all(content) == {"a": ["~/x", 1, None], "~/y": {"b": [SECRET, True]}}
    provenance.write_report(tmp_path / "report.json", content)
    assert "ann" not in (tmp_path / "report.json").read_text()
