"""A drafter's code beside its weights, so that `AutoModel` loads it with `trust_remote_code=True` without this package.

transformers takes only files beside config.json that import each other with `from .name import`. So the modules that
generating needs are written as such: `decoding/accept.py` as `dspark_decoding_accept.py`. This package never runs them;
it loads a folder that holds them like any other.

The module is itself among those written. There, beside the others, it hands out the files as they lie.
"""

import ast
import os
import re
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import CheckpointFormatError

# The two modules that config.json names keep their names.
_CONFIGURATION, _MODELING = "configuration_dspark", "modeling_dspark"
AUTO_CONFIG = f"{_CONFIGURATION}.DSparkConfig"
AUTO_MODEL = f"{_MODELING}.DSparkDraftModel"

_HERE = Path(__file__)
_IS_COPY = _HERE.stem != "remote_code"
_ROOT = _HERE.parent if _IS_COPY else _HERE.parent.parent

_HEADER = "# Written by dspark_hf "  # so begins every file that may be replaced or removed
# What stays in the package; functions that need it ask for it when they are called.
_LEFT_OUT = (
    "evaluation",
    "hub.card",
    "hub.files",
    "hub.publish",
    "hub.push_drafter",
    "hub.remote",
    "prompts",
    "training",
)

_FIRST_LINES = {
    _CONFIGURATION: "from .dspark_compat import check_version\n\ncheck_version()\n\n",
}
_LAST_LINES = {
    # A config may be loaded, and then saved, alone: with this line transformers copies the whole code for it too.
    _CONFIGURATION: (
        "\n\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .modeling_dspark import DSparkDraftModel\n"
    ),
    # As the package's `__init__.py` does. The route needs the model's class, so it comes after it.
    _MODELING: "\n\nfrom .dspark_decoding_route import install\n\ninstall()\n",
}


def is_own_auto_map(auto_map: Any) -> bool:
    """Whether the `auto_map` of a config.json names classes of this package only.

    Code of another repository (`org/name--file.Class`) is not ours, whatever its name: saved again, the drafter would
    send whoever trusts it there. For the code that is already running from such a repository transformers adds that.
    """
    return isinstance(auto_map, dict) and all(
        isinstance(name, str) and (name.rpartition("--")[2] if _IS_COPY else name) in (AUTO_CONFIG, AUTO_MODEL)
        for name in auto_map.values()
    )


def needs_code_beside(auto_map: Any) -> bool:
    """Whether a config.json with this `auto_map` expects our code in its own folder."""
    return isinstance(auto_map, dict) and any(name in (AUTO_CONFIG, AUTO_MODEL) for name in auto_map.values())


def write_code(folder: str | os.PathLike[str]) -> None:
    """Write a drafter's code into a folder, each file whole or not at all, and remove what an earlier one left over.

    Raises:
        CheckpointFormatError: a file of somebody else has a name of ours; nothing has been written.
        OSError: the folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    files = code_files()
    for name in files:
        if os.path.lexists(place / name) and not is_own_code(place / name):
            raise CheckpointFormatError(
                f"{place / name} was not written by dspark_hf, and saving the drafter's code would replace it; move it "
                "away, or save into another folder"
            )
    for name, text in files.items():
        partial = place / f".{name}.{os.getpid()}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, place / name)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    remove_code(place, keep=files)


def remove_code(folder: str | os.PathLike[str], *, keep: Container[str] = ()) -> None:
    """Remove the files that [`write_code`] wrote into a folder, but for those named in `keep`; other code stays."""
    for path in Path(folder).glob("*.py"):
        if path.name not in keep and is_own_code(path):
            path.unlink()


def is_own_code(path: Path) -> bool:
    """Whether a file was written by [`write_code`]."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER.encode()


@cache
def code_files() -> dict[str, str]:
    """The text of each file, by name."""
    files: dict[str, str] = {}
    modules = [_CONFIGURATION, _MODELING]
    for module in modules:  # grows
        text, imported = _as_it_lies(module) if _IS_COPY else _flattened(module)
        files[f"{_flat_name(module)}.py"] = text
        modules += [name for name in dict.fromkeys(imported) if name not in modules]
    assert len(files) == len(modules), "two modules have one flat name"
    return files


def _flat_name(module: str) -> str:
    """`decoding.accept` as `dspark_decoding_accept`."""
    if _IS_COPY or module in (_CONFIGURATION, _MODELING):
        return module
    return "_".join(["dspark", *(part.strip("_") for part in module.split("."))])


def _as_it_lies(module: str) -> tuple[str, list[str]]:
    """Text of a file beside this one, and the files that it imports."""
    text = (_ROOT / f"{module}.py").read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text))
    return text, [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def _flattened(module: str) -> tuple[str, list[str]]:
    """Text of a module's flat file, and the modules that it imports, as dotted names below the package."""
    path = _path_of(module)
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    imported = []
    for node in ast.walk(tree):
        _check_import(module, node)
        if isinstance(node, ast.ImportFrom) and node.level:
            name = ".".join([*module.split(".")[: -node.level], str(node.module)])
            if _is_left_out(name):
                _import_from_the_package(lines, node, name)
            else:
                assert _path_of(name).is_file(), f"{module} imports from {name}, which is no module"
                _import_flat(lines, node, name)
                imported.append(name)
    if module in _FIRST_LINES:
        first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
        lines[first.lineno - 1] = _FIRST_LINES[module] + lines[first.lineno - 1]
        imported.append("_compat")
    if module in _LAST_LINES:
        lines.append(_LAST_LINES[module])
        imported.append({_CONFIGURATION: _MODELING, _MODELING: "decoding.route"}[module])
    header = f"{_HEADER}{__version__} from its {path.relative_to(_ROOT).as_posix()}, Apache-2.0; do not edit.\n"
    return header + "".join(lines), imported


def _path_of(module: str) -> Path:
    return _ROOT.joinpath(*module.split(".")).with_suffix(".py")


def _is_left_out(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _LEFT_OUT)


def _check_import(module: str, node: ast.AST) -> None:
    """Our modules import each other in the one way that can be written flat, so that nothing is missed in silence."""
    where = f"{module}, line {getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.ImportFrom) and node.level:
        assert node.module is not None, f"{where}: write `from .name import`, transformers overlooks `from . import`"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        assert all(name.split(".")[0] != "dspark_hf" for name in names), f"{where}: imports the package by its name"
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        assert not ast.unparse(node.args[0]).lstrip("f'\"").startswith("."), f"{where}: imports by a relative string"


def _import_flat(lines: list[str], node: ast.ImportFrom, name: str) -> None:
    index = node.lineno - 1
    lines[index], count = re.subn(r"^(\s*)from \S+ import", rf"\1from .{_flat_name(name)} import", lines[index])
    assert count == 1, f"line {node.lineno}: `from ... import` does not begin it"


def _import_from_the_package(lines: list[str], node: ast.ImportFrom, name: str) -> None:
    """In a `try`, where transformers does not take the package for a requirement of the whole file."""
    assert node.col_offset, f"line {node.lineno}: a drafter's code is without {name}; import it where it is used"
    names = ", ".join(ast.unparse(alias) for alias in node.names)
    message = "this needs the package dspark_hf; the code beside a drafter only generates"
    block = [
        "try:",
        f"    from dspark_hf.{name} import {names}",
        "except ImportError as error:",
        f'    raise ImportError("{message}") from error',
    ]
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    lines[first:last] = ["".join(f"{' ' * node.col_offset}{line}\n" for line in block), *[""] * (last - first - 1)]
