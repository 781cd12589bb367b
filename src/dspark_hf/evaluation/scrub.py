"""Reports are shared: secrets, home folders and user names are taken out of their texts."""

import getpass
import os
import re
from collections.abc import Sequence
from typing import Any

# A plain word: a command in which it stands needs no other quotes than before.
SECRET = "REDACTED"

# A word of a shell line, quoted parts included.
_WORD = r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])+"
# Names that hold a secret. `tokens`, `tokenizer`, `eos_token_id` and `first_token_s` (seconds) do not.
_SECRET_NAME = (
    r"[\w.-]*(?:token(?!s|iz|_id|-id|_m?s(?![a-z]))|secret|passw(?:or)?d|passphrase|pwd|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential)[\w.-]*"
)

_SECRETS = [
    # Known shapes, of model hubs and services, code hosts, clouds and chats, and JSON web tokens.
    (r"(?<!\w)hf_[A-Za-z0-9]{8,}|hf_[A-Za-z0-9]{30,}", SECRET),
    (r"\bsk-[A-Za-z0-9_-]{8,}", SECRET),
    (r"gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}", SECRET),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}", SECRET),
    (r"\bxox[a-z]-[\w-]{8,}", SECRET),
    (r"\beyJ[\w-]+\.[\w-]+\.[\w-]*", SECRET),
    (rf"(?i)\b(bearer|authorization:\s*\w+)\s+{_WORD}", rf"\1 {SECRET}"),
    # User and password of a URL.
    (r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^/\s'\"]*@", rf"\1{SECRET}@"),
    # KEY=value, "key": "value", --key=value
    (rf"(?i)(?<![\w.-])({_SECRET_NAME}['\"]?\s*[=:]\s*){_WORD}", rf"\1{SECRET}"),
    # --key value
    (rf"(?i)(?<![\w-])(--?{_SECRET_NAME}\s+)(?!-){_WORD}", rf"\1{SECRET}"),
]

# What nobody writes for another reason, so that a file may be refused for it.
_TOKEN = re.compile(
    r"(?:hf_|gh[pousr]_|github_pat_|\bsk-|\bglpat-|\bxox[a-z]-)[A-Za-z0-9_-]{30,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)

# Home folders of any user, on Linux, macOS and Windows, up to the user's name.
_ANY_HOMES = [
    r"(?:/home|/Users|[A-Za-z]:[/\\]+Users)[/\\]+[^/\\\s'\"]+",
    r"(?<![\w.~-])/root(?![^/\\\s'\":,;)])",
    r"(?<![\w/~])~[A-Za-z_][\w.-]*(?=/)",
]
# Accounts that are named alike everywhere, and words besides.
_COMMON_USERS = frozenset({"root", "user", "admin", "ubuntu", "runner", "test", "build"})


def scrub(text: str) -> str:
    """`text` without secrets, home folders and this user's name, for what leaves the machine.

    Secrets become `REDACTED`: tokens of known shapes, values of names like `API_KEY` or `--token`, credentials in
    URLs. Home folders of any user become `~`. This user's name, where it is part of a path or of an address, becomes
    `USER`.
    """
    own = os.path.expanduser("~")
    if len(own) > 1:  # a home of "/" would match every path
        text = re.sub(rf"(?<![\w.~-]){re.escape(own)}(?![^/\\\s'\":,;)])", "~", text)
    return _without_user(scrub_any(text))


def scrub_any(text: str) -> str:
    """The part of `scrub` that depends on the text alone, and so gives the same on every machine."""
    for pattern, replacement in _SECRETS:
        text = re.sub(pattern, replacement, text)
    for pattern in _ANY_HOMES:
        text = re.sub(pattern, "~", text)
    return text


def holds_token(text: str) -> bool:
    """Whether a text surely holds a token or a private key; `scrub` takes out more, also what is only likely one."""
    return _TOKEN.search(text) is not None


def scrub_arguments(arguments: Sequence[str]) -> list[str]:
    """`scrub` for the arguments of a command, where what belongs to a secret's name needs no guess."""
    scrubbed = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_name = not is_value and re.fullmatch(_SECRET_NAME, name, re.IGNORECASE) is not None
        scrubbed.append(SECRET if is_value else f"{name}={SECRET}" if is_name and equals else scrub(argument))
        is_value = is_name and not equals and argument.startswith("-")
    return scrubbed


def scrub_all(content: Any) -> Any:
    """`scrub` for every text in dicts and lists, keys included; a text under a secret's name is one."""
    if isinstance(content, str):
        return scrub(content)
    if isinstance(content, dict):
        return {
            scrub_all(key): SECRET if _is_secret(key, value) else scrub_all(value) for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [scrub_all(value) for value in content]
    return content


def _is_secret(key: Any, value: Any) -> bool:
    is_text = isinstance(key, str) and isinstance(value, str)
    return is_text and re.fullmatch(_SECRET_NAME, key, re.IGNORECASE) is not None


def _without_user(text: str) -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return text
    if len(name) < 3 or name.lower() in _COMMON_USERS:
        return text
    name = re.escape(name)
    return re.sub(rf"(?<=[/\\]){name}(?![\w.-])|(?<![\w.-]){name}(?=@)", "USER", text)
