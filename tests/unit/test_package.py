"""The package as a whole: public names, documentation of them, and imports that go one way."""

import ast
import inspect
from pathlib import Path

import dspark_hf

SOURCE = Path(dspark_hf.__file__).parent

# Each module may import from the groups before it, and from its own.
ORDER = [
    ["errors", "_version"],
    ["layer_rules"],
    # From a name to a folder that may be loaded.
    [
        *(f"checkpoints.{name}" for name in ("fields", "deepspec", "deepspec_eagle3", "zlab", "specforge")),
        *(f"checkpoints.{name}" for name in ("speculators", "detect")),
        *(f"checkpoints.{name}" for name in ("json_files", "weights", "headers")),
        "hub.faults",
        "hub.fetch",
    ],
    [
        "_compat",
        "_machine",
        "checkpoints.digest",
        "checkpoints.source",
        "hub.pushing",
        "hub.remote_code",
        "target_traits",
    ],
    ["configuration_dspark", "configuration_autoregressive", "config_rules"],
    ["model."],
    ["modeling_dspark", "modeling_autoregressive"],
    # What rounds cost on this machine, which the scheduler weighs; the rest of fitting/ watches rounds.
    [f"fitting.{name}" for name in ("fingerprint", "throughput", "measuring", "profile_store", "step_residuals")],
    ["decoding."],
    ["prompts", "zoo_wheel", "zoo"],
    ["fitting."],
    ["evaluation.", "training.", "hub.", "checkpoints."],
    ["demo."],
    [""],  # the package's __init__
]


def rank(module):
    for position, group in enumerate(ORDER):
        if any(module == name or (name.endswith(".") and module.startswith(name)) for name in group):
            return position
    raise AssertionError(f"{module!r} has no place in the order of imports")


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if parts[-1] != "__init__" or not name:
            yield name, path


def imported_modules(name, path):
    """Modules of this package that a file imports, as dotted names below the package."""
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if (SOURCE / Path(*target.split("."))).with_suffix(".py").is_file():
                yield target
            else:
                yield from (f"{target}.{alias.name}".lstrip(".") for alias in node.names)


def test_imports_go_one_way():
    for name, path in modules():
        for target in imported_modules(name, path):
            assert rank(target) <= rank(name), f"{name} imports {target}"


def test_the_order_check_can_fail():
    assert rank("model.backbone") < rank("decoding.loop")
    assert list(imported_modules("decoding.loop", SOURCE / "decoding" / "loop.py"))


def test_public_names_are_sorted_exist_and_are_documented():
    names = dspark_hf.__all__
    assert names == sorted(names)
    for name in names:
        value = getattr(dspark_hf, name)
        if name != "__version__":
            assert inspect.getdoc(value), f"{name} has no docstring"
    public = {n for n, v in vars(dspark_hf).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public - {"AutoConfig", "AutoModel"} <= set(names)
