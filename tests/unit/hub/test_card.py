"""Cards: every number from a report, nothing that was not measured, nothing from outside that becomes markup."""

import ast
import json
import re
import shutil

import pytest
import yaml
from card_reports import (
    ENTRY,
    PNG,
    calibration_report,
    evaluation_report,
    make_drafter,
    pair,
    speed_report,
    training_report,
    whole_folder,
)
from markdown_it import MarkdownIt

import dspark_hf
from dspark_hf import zoo
from dspark_hf.checkpoints.digest import checkpoint_facts
from dspark_hf.errors import CheckpointFormatError, ReportError
from dspark_hf.evaluation.report_files import keep_report
from dspark_hf.hub import card_facts
from dspark_hf.hub.card import is_rendered, render_card, reports_address, write_card
from dspark_hf.hub.report_store import About, add_report, keep_about, read_about


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return whole_folder(tmp_path_factory.mktemp("drafters") / "mine")


@pytest.fixture
def bare(tmp_path):
    return make_drafter(tmp_path / "bare")


@pytest.fixture
def own(whole, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(whole, tmp_path / "mine")


def sections(text):
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def metadata(text):
    return yaml.safe_load(text.split("---\n")[1])


def program(text):
    return re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1]


# --- what it says --------------------------------------------------------------------------------------------------


def test_a_card_has_its_parts_in_order_and_starts_with_a_program(whole):
    text = render_card(whole, repo_id="org/mine")
    assert sections(text) == [
        "Accepted length", "Speed", "Calibration", "Training", "Size and cost", "Hardware and versions", "Limits",
        "How to reproduce", "Citation",
    ]  # fmt: skip
    assert text.index("```python") < text.index("## ")
    names = [node.value for node in ast.walk(ast.parse(program(text))) if isinstance(node, ast.Constant)]
    assert "org/mine" in names and "org/tiny-target" in names


@pytest.mark.parametrize(
    "shown",
    [
        "| gsm8k | 20 | 2.50 (2.38 to 2.62) | 2.50 (2.38 to 2.62) |",
        "| **all, pooled** | 40 | **2.25 (2.12 to 2.38)** |",
        "| conditional acceptance, greedy | 0.750 | 0.500 |",
        "80 texts that the target wrote (at most 128 new tokens each), every draft\nverified, in bfloat16 on cpu: AMD",
        "| gsm8k | 10 | 1.88x (1.75 to 2.00) | 2.25 (2.12 to 2.38) |",
        "Without the drafter 32.0 tokens/s, with it 64.0.",
        "19 of 20 texts are identical",
        "%: draft 15, verify 60.",
        "| full / plain, dynamic | 1.38 ± 0.06 | 1.50 ± 0.06 |",
        "| full, static / plain, static |",
        "over slots: 6.25 % before,\n**3.12 %** after",
        "| 1 | 50.0 | 62.5, 62.5 | 25.0 (12.5 to 37.5) |",
        "](reports/calibration-greedy.png)",
        "](reports/training.png)",
        "| 1 | 640 | 1,234 | 78,976 | 4 | 0.003 | 25 | 7 | 1.50 | cpu: AMD EPYC 9B14, 2 threads | aaaaaaa |",
        "| answers.jsonl | org/tiny-target | 0, 1 | 256 | org/prompts:main, mine.jsonl | sha256 cccccccccccccccc, not "
        "thinking",
        "| parameters | 0.0 M | 1.0 M |",
        "Drafting takes 25.0 % of the time",
        "dspark train data x\ndspark eval --texts eval.jsonl\n",
        "dspark compare --prompts-file speed.jsonl",
        "| evaluation | cpu: AMD EPYC 9B14, 2 threads | bfloat16 | dspark_hf 0.1.0, torch 2.13.0 | aaaaaaa | 2026",
        "arXiv:2607.05147",
    ],
)
def test_a_card_shows_what_was_measured(whole, shown):
    assert shown in render_card(whole)


def test_metadata_say_what_the_hub_indexes(whole):
    found = metadata(render_card(whole, repo_id="org/mine"))
    assert found["library_name"] == "dspark-hf" and found["base_model"] == "org/tiny-target"
    assert found["pipeline_tag"] == "text-generation" and "speculative-decoding" in found["tags"]
    assert found["datasets"] == ["org/prompts"] and "license" not in found
    (entry,) = found["model-index"]
    assert entry["name"] == "org/mine"
    metrics = [(one["dataset"]["name"], m) for one in entry["results"] for m in one["metrics"]]
    values = {(name, m["type"], m["name"]): m["value"] for name, m in metrics}
    assert values["gsm8k", "accepted_length", "tokens per round, bonus token counted, greedy"] == 2.5
    assert {kind for _, kind, _ in values} == {"accepted_length", "speed_ratio", "expected_calibration_error"}
    assert all(m["args"] for _, m in metrics)


def test_another_drafter_of_the_same_report_is_left_out(whole):
    assert "9.75" not in render_card(whole)


def test_a_card_is_the_same_every_time_and_everywhere(whole, own, monkeypatch):
    text = render_card(whole)
    monkeypatch.setenv("HOME", "/nowhere")
    assert render_card(own) == text


def test_without_reports_a_card_has_no_number_that_was_not_read_from_the_drafter(bare):
    text = render_card(bare, repo_id="org/bare")
    for missing in ("dspark eval", "dspark compare", "dspark calibrate", "dspark train"):
        assert missing in text
    assert "model-index" not in text and "base_model" not in text
    assert card_facts.PLACEHOLDER in program(text)
    body = text.split("## Accepted length")[1].split("## Citation")[0]
    facts = checkpoint_facts(bare)
    allowed = {"16", f"{facts.num_bytes / 1e6:.1f}", f"{facts.num_parameters / 1e6:.1f}"}
    allowed.add(str(card_facts.cache_bytes_per_token(dspark_hf.DSparkConfig.from_pretrained(bare))))
    assert set(re.findall(r"\b\d+(?:\.\d+)?", body)) <= allowed


def test_what_only_the_config_notes_of_a_calibration_is_said_to_be_so(own):
    (own / "reports" / "calibration-greedy.json").unlink()
    text = render_card(own)
    assert (
        "fitted on 900 rounds, with a mean expected calibration\nerror of 6.25 % before and 3.12 % after; the" in text
    )


def test_a_drafter_without_confidence_head_has_nothing_to_calibrate(tmp_path):
    folder = make_drafter(tmp_path / "x", enable_confidence_head=False)
    assert "nothing to calibrate" in render_card(folder)


def test_a_reduced_vocabulary_is_among_the_limits(tmp_path):
    folder = make_drafter(tmp_path / "x", draft_vocab_size=20)
    assert "Tokens outside the 20 of its vocabulary" in render_card(folder)


def test_runs_before_the_last_are_shown_and_by_hand_is_said(own):
    sha256 = checkpoint_facts(own).sha256
    earlier = training_report(sha256, num_steps=4321, initial_drafter="org/first")
    last = training_report(sha256, earlier_runs=[earlier], is_finished=False, written_by_hand="from notes", data=[])
    keep_report(own, "training", last | {"about_data": "2,000 answers", "about_compute": "an hour"})
    text = render_card(own)
    assert "| 1 | 640 | 4,321 |" in text and "| 2 | 640 | 1,234 |" in text
    assert "written down by hand: from notes" in text and "Data: 2,000 answers" in text and "Compute: an hour" in text
    assert "ended before its last step" in text and "started from the drafter org/first, whose" in text


def test_several_reports_of_a_kind_have_their_names_over_them(own):
    sha256 = checkpoint_facts(own).sha256
    keep_report(own, "speed-gpu", speed_report(sha256, num_planned=30) | {"is_complete": False})
    text = render_card(own)
    assert "### speed\n" in text and "### speed-gpu\n" in text
    assert "cut short: 30 prompts were planned" in text


@pytest.mark.parametrize(
    ("thinking", "said"),
    [
        ("absent", "the template has no thinking mode"),
        ("on", "thinking, which is"),
        ("own", "the template's own default"),
    ],
)
def test_thinking_modes(own, thinking, said):
    sha256 = checkpoint_facts(own).sha256
    report = speed_report(sha256)
    report["pair"]["chat_template"] = {"sha256": "d" * 64, "thinking": thinking}
    keep_report(own, "speed", report)
    assert f"- sha256 dddddddddddddddd, {said}" in render_card(own)


def test_a_target_without_chat_template_gets_a_program_without_one(own):
    for path in (own / "reports").glob("*.json"):
        report = json.loads(path.read_text())
        for one in [report.get("pair"), *report.get("pairs", {}).values()]:
            if one:
                one["chat_template"] = {"sha256": None, "thinking": "absent"}
        path.write_text(json.dumps(report))
    text = render_card(own)
    assert "apply_chat_template" not in program(text) and "no chat template" in text
    ast.parse(program(text))


# --- reports of others ---------------------------------------------------------------------------------------------


def test_reports_of_other_weights_are_named_and_not_shown(own):
    keep_report(own, "evaluation", evaluation_report("e" * 64))
    text = render_card(own)
    assert "- evaluation.json: it is of other weights" in text
    assert "2.50 (2.38 to 2.62)" not in text and "no report of `dspark eval`" in text


def test_a_report_of_another_calibration_is_named_and_not_shown(own):
    sha256 = checkpoint_facts(own).sha256
    keep_report(own, "calibration-greedy", calibration_report(sha256, temperatures=[1.5, 1.375]))
    text = render_card(own)
    assert "- calibration-greedy.json: it is of another calibration" in text
    assert "the report that says more is not kept" in text


def test_weights_and_gamma_make_a_drafter_and_calibration_does_not(tmp_path):
    plain, calibrated = make_drafter(tmp_path / "a"), make_drafter(tmp_path / "b", calibration={"greedy": ENTRY})
    others = [make_drafter(tmp_path / "c", seed=2), make_drafter(tmp_path / "d")]
    config = json.loads((others[1] / "config.json").read_text())
    (others[1] / "config.json").write_text(json.dumps(config | {"block_size": 3}))
    found = [checkpoint_facts(folder).sha256 for folder in (plain, calibrated, *others)]
    assert found[0] == found[1] and len(set(found)) == 3


def test_adding_a_report_checks_trims_and_scrubs_it(bare, tmp_path):
    sha256 = checkpoint_facts(bare).sha256
    file = tmp_path / "results.json"
    file.write_text(json.dumps(speed_report(sha256, target="/home/ann/target") | {"prompts": [1]}))
    file.with_suffix(".png").write_bytes(PNG)
    kept = add_report(bare, file)
    assert kept == bare / "reports" / "speed.json"
    content = json.loads(kept.read_text())
    assert content["target"] == "~/target" and "prompts" not in content
    assert kept.with_suffix(".png").read_bytes() == PNG
    labelled = tmp_path / "speed-h200.json"
    labelled.write_text(file.read_text())
    assert add_report(bare, labelled).name == "speed-h200.json"
    assert not (bare / "reports" / "speed-h200.png").exists()
    assert add_report(bare, kept) == kept and kept.with_suffix(".png").exists()  # in its own place


def test_a_new_report_takes_the_old_ones_figure_away(bare, tmp_path):
    sha256 = checkpoint_facts(bare).sha256
    keep_report(bare, "speed", speed_report(sha256)).write_bytes(PNG)
    file = tmp_path / "new.json"
    file.write_text(json.dumps(speed_report(sha256)))
    add_report(bare, file)
    assert not (bare / "reports" / "speed.png").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair": {"drafter_sha256": "e" * 64}}, "other weights .eeeeeeeeeeee. than those in"),
        ({"pair": None}, "other weights .not said which"),
        ({"kind": None}, "kind must be one of training, evaluation, .*, got None"),
        ({"kind": "poem"}, "kind must be one of .*, got 'poem'"),
        ({"pair": [1]}, "pair must be an object"),
        ({"pairs": {"x": 3}}, "x must be an object, got 3"),
    ],
)
def test_a_report_that_cannot_be_kept_changes_nothing(bare, tmp_path, change, message):
    file = tmp_path / "speed.json"
    file.write_text(json.dumps(speed_report(checkpoint_facts(bare).sha256) | change))
    with pytest.raises(ReportError, match=message):
        add_report(bare, file)
    assert not (bare / "reports").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must hold one JSON object, got a list"),
        (b"{", "cannot be read as a report"),
        (b"\xff\xfe", "cannot be read as a report"),
        (b"[" * 100_000, "cannot be read as a report"),
    ],
)
def test_damaged_reports_are_refused_by_name(own, content, message):
    (own / "reports" / "speed.json").write_bytes(content)
    with pytest.raises(ReportError, match=f"speed.json {message}"):
        render_card(own)


def test_a_report_of_many_megabytes_is_not_read(own, monkeypatch):
    monkeypatch.setattr("dspark_hf.hub.fields.MAX_REPORT_BYTES", 10)
    with pytest.raises(ReportError, match="has [0-9]+ bytes, and a report at most 10"):
        render_card(own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plain_tokens_per_s": "fast"}, "plain_tokens_per_s must be a finite number, got 'fast'"),
        ({"plain_tokens_per_s": True}, "plain_tokens_per_s must be a finite number"),
        ({"plain_tokens_per_s": 10**400}, "plain_tokens_per_s must be a finite number"),
        ({"policy": 3}, "policy must be a text, got 3"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be a whole number from 0"),
        ({"is_complete": "yes"}, "is_complete must be true or false"),
        ({"stages": {}}, None),
        ({"stages": 3}, "stages must be a list"),
        ({"stages": [3]}, r"stages\[0\] must be an object"),
        ({"domains": []}, None),
        ({"domains": [1]}, "domains must be an object"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(own, change, message):
    path = own / "reports" / "speed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ReportError, match=f"speed.json: {message or '(stages|domains) must be'}"):
        render_card(own)


def test_lists_of_numbers_hold_numbers(own):
    path = own / "reports" / "evaluation.json"
    report = json.loads(path.read_text())
    report["scores"][1]["conditional_acceptance"] = [0.5, "x"]
    path.write_text(json.dumps(report))
    with pytest.raises(ReportError, match="conditional_acceptance must be a list of finite numbers"):
        render_card(own)


def test_a_platt_map_of_another_shape_is_refused(own):
    path = own / "reports" / "calibration-greedy.json"
    report = json.loads(path.read_text())
    report["modes"]["greedy"]["platt"] = "none"
    path.write_text(json.dumps(report))
    with pytest.raises(ReportError, match="platt must be a list"):
        render_card(own)


def test_a_platt_map_is_shown(tmp_path):
    platt = [[1.5, -0.25], [1.0, 0.0]]
    folder = make_drafter(tmp_path / "x", calibration={"sampled": ENTRY | {"platt": platt}})
    sha256 = checkpoint_facts(folder).sha256
    keep_report(folder, "calibration-sampled", calibration_report(sha256, "sampled", platt=platt))
    assert "a 1.50, b -0.25 |" in render_card(folder)


def test_a_file_whose_name_says_another_kind_is_refused(own):
    shutil.move(own / "reports" / "speed.json", own / "reports" / "fast.json")
    with pytest.raises(ReportError, match=r"fast.json holds a report of kind 'speed'; name it speed.json or"):
        render_card(own)


# --- texts from outside --------------------------------------------------------------------------------------------

ATTACK = 'x`|\n---\n# gotcha\n<img src=x onerror=alert(1)>{{ config }}{% raw %}[a](b)"hf_abcdefghijklmnop /home/ann/x'


def poisoned(value):
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    keep = isinstance(value, str) and (re.fullmatch("[0-9a-f]{64}", value) or value in ("mine", "other", "greedy"))
    return ATTACK if isinstance(value, str) and not keep else value


def test_no_text_of_a_report_becomes_markup(own):
    clean = render_card(own)
    for path in (own / "reports").glob("*.json"):
        report = json.loads(path.read_text())
        kind = report.pop("kind")
        for row in report.get("rows", []):  # a plain way is told by its name
            row["ratios"] = {"plain, dynamic": row["ratios"]["plain, dynamic"]}
        path.write_text(json.dumps(poisoned(report) | {"kind": kind}))
    text = render_card(own)
    assert "hf_abc" not in text and "/home/ann" not in text
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")

    def parts(card, kind):
        return [token for token in markdown.parse(card.split("---\n", 2)[2]) if token.type == kind]

    assert [token.content for token in parts(text, "html_block")][1:] == []  # the mark itself
    assert len(parts(text, "heading_open")) == len(parts(clean, "heading_open"))
    inline = [child for token in parts(text, "inline") for child in token.children]
    assert not [child for child in inline if child.type == "html_inline"]
    links = {child.attrs["href"] for child in inline if child.type == "link_open"}
    assert links == {"https://arxiv.org/abs/2607.05147"}
    assert "gotcha" in text  # it is shown, as a text
    assert set(metadata(text)) <= {"library_name", "pipeline_tag", "tags", "datasets", "model-index"}
    assert "{{ config }}" in text


def test_a_folder_with_a_hostile_name(tmp_path):
    folder = make_drafter(tmp_path / "x`|# <b>{{ config }}")
    text = render_card(folder)
    assert "# x\\`\\|\\# &lt;b&gt;{{ config }}" in text


# --- what its author says ------------------------------------------------------------------------------------------


def test_notes_are_quoted_and_said_to_be_by_hand(own):
    (own / "notes.md").write_text("# Mine\n\n- a\n- b, see /home/ann/x\n")
    text = render_card(own)
    assert "Written by hand by the drafter's author, and not checked" in text
    assert "> # Mine\n>\n> - a\n> - b, see ~/x\n" in text
    assert "Notes" in sections(text)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\xfd", "cannot be read"), (b"a" * 300_000, "more than 200000 bytes")]
)
def test_notes_that_cannot_be_shown(bare, content, message):
    (bare / "notes.md").write_bytes(content)
    with pytest.raises(ReportError, match=f"notes.md .*{message}|notes.md has {message}"):
        render_card(bare)


def test_base_model_and_license_are_kept(bare):
    keep_about(bare, About(base_model="org/base"))
    keep_about(bare, About(license="apache-2.0"))
    assert read_about(bare) == About("org/base", "apache-2.0")
    text = render_card(bare, repo_id="org/x")
    assert metadata(text)["base_model"] == "org/base" and metadata(text)["license"] == "apache-2.0"
    assert "[org/base](https://huggingface.co/org/base)" in text and '"org/base"' in program(text)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (About(base_model="/home/x/y"), "base_model must be a Hub id"),
        (About(license="Apache License\n"), "license must be an identifier"),
    ],
)
def test_metadata_that_the_hub_would_not_take(bare, about, message):
    with pytest.raises(ReportError, match=message):
        keep_about(bare, about)
    assert read_about(bare) == About()


def test_a_card_needs_a_drafter_and_a_hub_id(bare, tmp_path):
    with pytest.raises(ReportError, match="repo_id must be a Hub id .owner/name., got 'a/b/c'"):
        render_card(bare, repo_id="a/b/c")
    with pytest.raises(CheckpointFormatError, match="is not a folder; pass a drafter's folder"):
        render_card(tmp_path / "nothing")
    (bare / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        render_card(bare)


# --- programs ------------------------------------------------------------------------------------------------------


def test_a_local_card_names_the_folders_of_this_machine(bare):
    sha256 = checkpoint_facts(bare).sha256
    local = pair(sha256, target_hub_id=None, target_folder="~/models/tiny")
    keep_report(bare, "speed", speed_report(sha256, pair=local))
    text = render_card(bare)
    assert 'os.path.expanduser("~/models/tiny")' in program(text)
    assert 'DSparkDraftModel.from_pretrained(".")' in program(text)
    assert "drafter for tiny." in text and "base_model" not in text
    shared = program(render_card(bare, repo_id="org/bare"))
    assert "models" not in shared and card_facts.PLACEHOLDER in shared


def test_the_shipped_drafters_program_is_the_readmes():
    folder = zoo.bundled_drafter("smollm2-135m-instruct")
    text = program(render_card(folder))
    assert 'zoo.load_drafter("smollm2-135m-instruct")' in text
    ast.parse(text)
    assert "zoo" not in program(render_card(folder, repo_id="org/x"))


# --- the file ------------------------------------------------------------------------------------------------------


def test_a_card_that_was_changed_by_hand_is_not_lost(bare, tmp_path):
    path, text = tmp_path / "README.md", render_card(bare)
    write_card(path, text)
    assert path.read_text() == text and is_rendered(text)
    write_card(path, text)
    for changed in (text.replace("## Limits", "## My limits"), "# by hand\n", text.replace("pip", "pip ", 1)):
        assert not is_rendered(changed)
        path.write_text(changed)
        with pytest.raises(ReportError, match="written or changed by hand"):
            write_card(path, text)
        assert path.read_text() == changed
    write_card(path, text, replace=True)
    assert path.read_text() == text
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith(".partial")] == []


def test_where_a_card_finds_the_reports(tmp_path):
    assert reports_address(tmp_path / "a b" / "c", tmp_path / "cards" / "x.md") == "../a%20b/c/reports"
    assert reports_address(tmp_path, tmp_path / "README.md") == "reports"


@pytest.mark.parametrize("name", ["evaluation", "speed", "batches", "calibration-greedy"])
def test_numbers_that_were_written_down_by_hand_are_said_to_be_so(own, name):
    path = own / "reports" / f"{name}.json"
    assert "written down by hand" not in render_card(own)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"written_by_hand": "copied"}))
    assert render_card(own).count("These numbers were written down by hand: copied.") == 1


def test_what_is_undefined_is_a_dash(own):
    path = own / "reports" / "evaluation.json"
    report = json.loads(path.read_text())
    report["scores"][1]["conditional_acceptance"] = [0.75, None]
    report["scores"][1]["tau"]["gsm8k"] = {"value": None, "low": None, "high": None, "n": 20}
    path.write_text(json.dumps(report))
    text = render_card(own)
    assert "| conditional acceptance, greedy | 0.750 | - |" in text and "| gsm8k | 20 | - | 2.50 (" in text
