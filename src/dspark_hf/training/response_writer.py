"""Answers on disk while they are made: whole rows survive whatever stops the run, and the next one goes on.

`<output>.settings.json` says what the answers were made with. Rows lie in `<output>` for JSONL and in
`<output>.jsonl` for Parquet, which is written in one step when all answers are there.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import TrainingDataError
from ..evaluation.provenance import probe_folder
from .answering import Answer
from .response_prompts import import_datasets

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SUFFIXES = (".jsonl", ".parquet")


class ResponseWriter:
    """Appends answers to a file; a context manager, which closes the file.

    `finished` maps the id and temperature of each answer that an earlier run left to the hash of its prompt ids.

    Args:
        output: `.jsonl` or `.parquet`; its folder is made.
        identity: What determines the answers; an earlier run with another one is refused.
        run: What else a reader of the answers needs; one entry per run is kept.

    Raises:
        TrainingDataError: the suffix is another, the file holds answers made with other settings or something else,
            or cannot be written.
    """

    def __init__(self, output: Path, identity: dict[str, Any], run: dict[str, Any]) -> None:
        check_output(output)
        self._output = output
        self._is_parquet = output.suffix == ".parquet"
        self.lines_path = output.with_name(f"{output.name}.jsonl") if self._is_parquet else output
        self._settings_path = settings_path(output)
        self._file: Any = None
        if self._is_parquet:
            import_datasets("writing Parquet")  # now, not after hours of answers
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            runs = self._earlier_runs(identity)
            self.finished = self._read_finished()
            content = {"format_version": FORMAT_VERSION, "identity": identity, "runs": [*runs, run]}
            _write_whole(self._settings_path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise _cannot_write(output, error) from error

    def __enter__(self) -> "ResponseWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, answer: Answer) -> None:
        """Write one row, and leave it to the operating system.

        Raises:
            TrainingDataError: it cannot be written; all rows before it are kept whole.
        """
        row = {
            "id": answer.request.id,
            "temperature": answer.request.temperature,
            "prompt_ids": answer.request.prompt_ids,
            "response_ids": answer.response_ids,
        }
        line = memoryview(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        try:
            if self._file is None:
                self._file = self._open_lines()
            end = self._file.seek(0, os.SEEK_END)
            try:
                while line:  # an unbuffered file may take a part only
                    line = line[self._file.write(line) :]
            except BaseException:
                self._file.truncate(end)
                raise
        except OSError as error:
            raise _cannot_write(self.lines_path, error) from error

    def finish(self) -> None:
        """All answers are there: turn the rows into Parquet if that was asked for.

        Raises:
            TrainingDataError: it cannot be written; the rows are kept.
        """
        if self._is_parquet and self.lines_path.exists():
            try:
                _lines_to_parquet(self.lines_path, self._output)
                self.lines_path.unlink()
            except OSError as error:
                raise _cannot_write(self._output, error) from error

    def _open_lines(self) -> Any:
        if self._is_parquet and self._output.exists() and not self.lines_path.exists():
            # More answers for a finished file: its rows come first.
            rows = (json.dumps(row, ensure_ascii=False) for row in _parquet_rows(self._output))
            _write_whole(self.lines_path, "".join(f"{row}\n" for row in rows))
        return self.lines_path.open("ab", buffering=0)

    def _earlier_runs(self, identity: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs that made the rows found; raises where there are rows that these settings cannot go on with."""
        if not any(path.exists() and path.stat().st_size for path in (self._output, self.lines_path)):
            return []
        way_out = f"name another output, or remove {self._output.name} and {self._settings_path.name}"
        try:
            content = json.loads(self._settings_path.read_text(encoding="utf-8"))
            earlier, runs = dict(content["identity"]), list(content["runs"])
        except FileNotFoundError:
            raise TrainingDataError(
                f"{self._output} exists, and {self._settings_path.name}, which says how it was made, does not; name "
                "another output, or remove the file"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingDataError(f"{self._settings_path} cannot be read ({error}); {way_out}") from error
        asked = json.loads(json.dumps(identity))  # lists for tuples, as in the file
        differing = sorted(key for key in earlier.keys() | asked.keys() if earlier.get(key) != asked.get(key))
        if differing:
            changes = ", ".join(f"{key} {_short(earlier.get(key))}, now {_short(asked.get(key))}" for key in differing)
            raise TrainingDataError(f"{self._output} holds answers made with other settings: {changes}; {way_out}")
        return runs

    def _read_finished(self) -> dict[tuple[str, float], int]:
        if self.lines_path.exists():
            rows = _whole_lines(self.lines_path)
        elif self._output.exists():
            rows = _parquet_rows(self._output)
        else:
            return {}
        return {(row["id"], row["temperature"]): prompt_hash(row["prompt_ids"]) for row in rows}


def check_output(output: Path) -> None:
    """Find out before anything is loaded whether answers can be written under that name.

    Raises:
        TrainingDataError: the suffix is another than .jsonl and .parquet, a folder has that name, or no file can be
            made there.
    """
    if output.suffix not in SUFFIXES:
        raise TrainingDataError(f"the output must end in {' or '.join(SUFFIXES)}, got {str(output)!r}")
    if output.is_dir():
        raise TrainingDataError(f"the output {str(output)!r} is a folder; name a file in it")
    try:
        probe_folder(next(folder for folder in output.absolute().parents if folder.exists()))
    except OSError as error:
        raise _cannot_write(output, error) from error


def settings_path(output: Path) -> Path:
    """File beside `output` that says what its answers were made with."""
    return output.with_name(f"{output.name}.settings.json")


def prompt_hash(prompt_ids: list[int] | tuple[int, ...]) -> int:
    """Tells two prompts apart within one process."""
    return hash(tuple(prompt_ids))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, after which it ends in a whole one: a line that a dying run left half-written is cut off."""
    end = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = _parse_row(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    logger.warning("%s: the last line is half an answer, it is made again", path)
                    break
                raise TrainingDataError(
                    f"{path}, line {number} is no answer ({error}); remove that line, and it is made again"
                ) from error
            end += len(line)
            yield row
        file.truncate(end)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _read_lines(path: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        yield from map(_parse_row, file)


def _parse_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    kinds = {"id": str, "temperature": int | float, "prompt_ids": list, "response_ids": list}
    if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"it needs {', '.join(kinds)}")
    return row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    datasets = import_datasets("reading Parquet")
    try:
        yield from datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except Exception as error:  # the readers of damaged files have errors of many kinds
        raise TrainingDataError(f"{path} cannot be read ({error}); remove it, or name another output") from error


def _lines_to_parquet(lines: Path, output: Path) -> None:
    datasets = import_datasets("writing Parquet")
    # Told, not guessed: an id that looks like a date would become one.
    ids = datasets.List(datasets.Value("int64"))
    columns = {"id": datasets.Value("string"), "temperature": datasets.Value("float64")}
    features = datasets.Features(columns | {"prompt_ids": ids, "response_ids": ids})
    table = datasets.IterableDataset.from_generator(_read_lines, features=features, gen_kwargs={"path": str(lines)})
    partial = output.with_name(f".{output.name}.partial")
    try:
        table.to_parquet(str(partial))
        os.replace(partial, output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_whole(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, error: OSError) -> TrainingDataError:
    return TrainingDataError(
        f"{path} cannot be written ({error.strerror or error}); free some space or name another output, and start "
        "again: finished answers are kept"
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:12]}...{text[-4:]}"
