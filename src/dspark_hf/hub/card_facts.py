"""What a card says about the pair itself: the target, the snippet, sizes, the chat template."""

from dataclasses import dataclass
from pathlib import Path

from .. import zoo
from ..checkpoints.digest import CheckpointFacts
from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from ..errors import ReportError
from ..evaluation.scrub import scrub_any
from .fields import Fields
from .files import leads_out
from .markdown import Safe, escape, link, one_line, table
from .numbers import count, millions, percent
from .report_store import About, StoredReport, is_in_config
from .run_views import template_of

NOTES_NAME = "notes.md"
MAX_NOTES_BYTES = 200_000
PLACEHOLDER = "path/or/hub-id-of-the-target"


@dataclass(frozen=True)
class TargetFacts:
    """The target as reports and the author tell of it; what nobody says is None.

    Attributes:
        dtype: It was measured in.
        has_chat_template: True where nobody says, as nearly all have one.
    """

    hub_id: str | None
    folder: str | None
    num_parameters: int | None
    num_bytes: int | None
    dtype: str | None
    has_chat_template: bool

    @property
    def name(self) -> str | None:
        """Of the last part of a folder."""
        return self.hub_id or (None if self.folder is None else Path(self.folder).name)


def target_facts(reports: list[StoredReport], about: About, sha256: str) -> TargetFacts:
    """From the first report that tells of the pair, one with sizes before one without."""
    told = [(report, pair) for report in reports if (pair := own_pair(report, sha256)) is not None]
    for report, pair in sorted(told, key=lambda one: one[1].count("target_num_parameters") is None):
        template = pair.one("chat_template")
        return TargetFacts(
            hub_id=about.base_model or _hub_id(pair),
            folder=pair.text("target_folder"),
            num_parameters=pair.count("target_num_parameters"),
            num_bytes=pair.count("target_num_bytes"),
            dtype=report.fields.one("provenance").text("dtype"),
            has_chat_template="sha256" not in template.content or template.text("sha256") is not None,
        )
    return TargetFacts(about.base_model, None, None, None, None, True)


def own_pair(report: StoredReport, sha256: str) -> Fields | None:
    """What a report says about the drafter of these weights and its target."""
    pairs = [report.fields.one("pair"), *report.fields.named("pairs").values()]
    own = [pair for pair in pairs if pair.text("drafter_sha256") == sha256]
    return own[0] if own else None


def _hub_id(pair: Fields) -> str | None:
    found = pair.text("target_hub_id")
    return found if found is not None and zoo.is_hub_id(found) else None


def target_link(target: TargetFacts) -> Safe:
    """The target's name, linked to the Hub if it is there."""
    if target.hub_id is not None:
        return link(target.hub_id, f"https://huggingface.co/{target.hub_id}")
    return Safe("its target") if target.name is None else Safe(escape(target.name))


def snippet(folder: Path, repo_id: str | None, target: TargetFacts) -> str:
    """A program that pairs drafter and target, with the names they really have."""
    if folder.resolve().parent == zoo.BUNDLED_ROOT and repo_id is None:
        name = _literal(folder.resolve().name)
        imports = ["from dspark_hf import zoo"]
        loading = [f"target = zoo.load_target({name})", f"tokenizer = zoo.load_tokenizer({name})"]
        loading += [f"drafter = zoo.load_drafter({name})"]
    else:
        source = target.hub_id or (PLACEHOLDER if repo_id is not None else target.folder) or PLACEHOLDER
        name = _literal(source)
        imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
        if source.startswith("~/"):
            imports = ["import os", "", *imports]
            name = f"os.path.expanduser({name})"
        imports += ["from dspark_hf import DSparkDraftModel"]
        loading = [f'target = AutoModelForCausalLM.from_pretrained({name}, dtype="auto")']
        loading += [f"tokenizer = AutoTokenizer.from_pretrained({name})"]
        local = "" if repo_id is not None else "  # run in this drafter's folder"
        loading += [f"drafter = DSparkDraftModel.from_pretrained({_literal(repo_id or '.')}){local}"]
    return "\n".join([*imports, "", *loading, "", *_prompt(target), *_RUN])


def _prompt(target: TargetFacts) -> list[str]:
    if not target.has_chat_template:
        return ['inputs = tokenizer("What is 17 plus 25? Answer:", return_tensors="pt")']
    return [
        'messages = [{"role": "user", "content": "What is 17 plus 25? Explain."}]',
        "inputs = tokenizer.apply_chat_template("
        'messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
    ]


_RUN = [
    "output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, return_dict_in_generate=True)",
    "print(tokenizer.decode(output.sequences[0]))",
    'print(f"{output.speculation.tau:.2f} tokens per round")',
]


def _literal(text: str) -> str:
    text = one_line(scrub_any(text))
    return f'"{text}"' if text.isascii() and '"' not in text and "\\" not in text else ascii(text)


def size_table(facts: CheckpointFacts, target: TargetFacts) -> Safe:
    """Drafter beside target, and in per cent of it."""
    rows: list[list[object]] = [
        [
            "parameters",
            millions(facts.num_parameters),
            millions(target.num_parameters),
            _share(facts.num_parameters, target.num_parameters),
        ],
        [
            f"weights, MB ({facts.dtype}; target {target.dtype or 'not measured'})",
            _megabytes(facts.num_bytes),
            _megabytes(target.num_bytes),
            _share(facts.num_bytes, target.num_bytes),
        ],
    ]
    return table(["", "drafter", "target", "drafter in % of target"], rows)


def _share(part: int, whole: int | None) -> Safe:
    return percent(part / whole if whole else None)


def _megabytes(num_bytes: int | None) -> Safe:
    return Safe("-" if num_bytes is None else f"{num_bytes / 1e6:,.1f}")


def architecture_table(config: DSparkConfig, target: Safe) -> Safe:
    """What the drafter is."""
    head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none (DFlash)"
    if isinstance(config, AutoregressiveConfig):
        head = {"mtp": "none (MTP)", "eagle3": "none (Eagle3)"}[config.drafter_type]
    drafted = config.draft_vocab_size or config.vocab_size
    return table(
        ["", ""],
        [
            ["target", target],
            ["draft layers", config.num_hidden_layers],
            ["drafts per round (gamma)", config.block_size],
            ["sequential head", head],
            ["confidence head", "yes" if config.enable_confidence_head else "no"],
            ["tokens that can be drafted", Safe(f"{count(drafted)} of {count(config.vocab_size)}")],
            ["policy, unless a call names one", config.verification_policy],
            ["made for", f"hidden size {config.hidden_size}, {config.num_target_layers} layers"],
        ],
    )


def cache_bytes_per_token(config: DSparkConfig) -> int:
    """Keys and values of one token in all draft layers, in 16-bit floats."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2


def checked_calibrations(reports: list[StoredReport], config: DSparkConfig) -> list[tuple[StoredReport, str]]:
    """Reports and names of modes whose fit is the one in config.json."""
    return [
        (report, name)
        for report in reports
        if report.kind == "calibration"
        for name, mode in report.fields.named("modes").items()
        if is_in_config(config, name, mode)
    ]


def chat_templates(reports: list[StoredReport], sha256: str) -> list[str]:
    """Templates under which this drafter was measured."""
    found = []
    for report in reports:
        pair = own_pair(report, sha256)
        if report.kind != "training" and pair is not None and "chat_template" in pair.content:
            found.append(template_of(pair.one("chat_template")))
    return list(dict.fromkeys(found))


def read_notes(folder: Path) -> Safe | None:
    """The author's own words as a quotation, so that they are told apart from what was measured.

    Raises:
        ReportError: the file cannot be read, is too large, or lies elsewhere.
    """
    path = folder / NOTES_NAME
    if not path.is_file():
        return None
    if leads_out(path, folder):
        raise ReportError(f"{path} is a link to a file outside of the folder; put the text itself there, or remove it")
    try:
        text = path.read_bytes()[: MAX_NOTES_BYTES + 1].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read ({error}); save it as UTF-8, or remove it") from error
    if len(text.encode()) > MAX_NOTES_BYTES:
        raise ReportError(f"{path} has more than {MAX_NOTES_BYTES} bytes, and notes at most that; shorten it")
    return Safe("\n".join(f"> {line}".rstrip() for line in scrub_any(text).strip().split("\n")))
