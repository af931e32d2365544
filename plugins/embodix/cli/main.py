# SPDX-License-Identifier: Apache-2.0
"""Dispatch of verbs: embodix's own, else upstream's ``lerobot-<verb>`` with the same arguments and exit code."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from pathlib import Path

from embodix import plugins


def embodix_main() -> None:
    """Entry point ``embodix``."""
    sys.exit(dispatch("embodix", sys.argv[1:]))


def lerobot_main() -> None:
    """Entry point ``lerobot``."""
    sys.exit(dispatch("lerobot", sys.argv[1:]))


def dispatch(program: str, argv: list[str]) -> int:
    """Run one verb and return its exit code.

    Args:
        program: name the user typed, ``lerobot`` or ``embodix``.
        argv: arguments after it; the first is the verb.
    """
    if argv and argv[0] in ("-sc", "--shell_completion"):
        return _complete(program, argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(program))
        return 0 if argv else 2
    verb, arguments = argv[0], argv[1:]
    if verb == "--version":
        from embodix import __version__

        print(f"embodix {__version__}")
        return 0
    if verb in _verbs():
        sys.argv = [f"{program} {verb}", *arguments]
        return _run_verb(verb, arguments)
    return _upstream(program, verb, arguments)


def _run_verb(verb: str, arguments: list[str]) -> int:
    try:
        run = plugins.resolve("verbs", verb)
    except plugins.PluginError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(run(arguments))


def _upstream(program: str, verb: str, arguments: list[str]) -> int:
    """Replace this process by upstream's command, so that arguments, signals and exit code are its own."""
    executable = shutil.which(f"lerobot-{verb}", path=_script_path())
    if executable is not None:
        sys.stdout.flush()
        os.execv(executable, [executable, *arguments])
    known = sorted({*_verbs(), *_upstream_verbs()})
    nearest = difflib.get_close_matches(verb, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    print(f"{program}: no verb is called {verb!r}.{hint} Verbs: {', '.join(known)}.", file=sys.stderr)
    return 2


def _verbs() -> dict[str, str]:
    """Registered verb -> summary."""
    registered = plugins.registry().implementations["verbs"]
    return {name: registration.summary for name, registration in registered.items()}


def _script_path() -> str:
    """This interpreter's script folder first, then PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _upstream_verbs() -> list[str]:
    scripts = Path(sys.executable).parent.glob("lerobot-*")
    return [script.name.removeprefix("lerobot-") for script in scripts]


def _usage(program: str) -> str:
    verbs = _verbs()
    lines = [f"usage: {program} <verb> [overrides]", "", "embodix:"]
    lines += [f"  {verb:10s}{summary}" for verb, summary in verbs.items()]
    upstream = [verb for verb in sorted(_upstream_verbs()) if verb not in verbs]
    lines += ["", f"upstream LeRobot (arguments as for lerobot-<verb>): {', '.join(upstream)}"]
    lines += ["", f"{program} <verb> --help shows the verb's config groups and fields; --cfg job the composed config."]
    lines += [f'Tab completion: eval "$({program} -sc install=bash)"']
    return "\n".join(lines)


def _complete(program: str, argv: list[str]) -> int:
    """Hydra's shell completion for a program whose first word is a verb.

    Hydra asks ``<program> -sc query=bash`` with the line in COMP_LINE; the verb is taken out of it and the
    verb's own application answers.
    """
    words = os.environ.get("COMP_LINE", "").split()
    if not argv[1:] or not argv[1].startswith("query="):
        sys.argv = [program, *argv]
        return int(plugins.resolve("verbs", "train")(argv))
    verb = words[1] if len(words) > 1 else ""
    if verb in _verbs() and (len(words) > 2 or os.environ["COMP_LINE"].endswith(" ")):
        os.environ["COMP_LINE"] = os.environ["COMP_LINE"].replace(f" {verb}", "", 1)
        sys.argv = [program, *argv]
        return int(plugins.resolve("verbs", verb)(argv))
    print(" ".join(v for v in sorted({*_verbs(), *_upstream_verbs()}) if v.startswith(verb)))
    return 0
