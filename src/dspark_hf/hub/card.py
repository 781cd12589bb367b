"""The card of a drafter: the text of its README.md on the Hub."""

from pathlib import Path


def render_card(folder: Path, *, repo_id: str | None = None) -> str:
    """The card of the drafter in `folder`, to be read at `repo_id`."""
    return (
        "---\nlibrary_name: dspark-hf\npipeline_tag: text-generation\n"
        "tags:\n- speculative-decoding\n- dspark\n- draft-model\n---\n\n"
        f"# {repo_id or folder.name}\n"
    )
