# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as rich tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from embodix.contracts import SimulatorStatus
from embodix.doctor.findings import Diagnosis, MachineFinding, VersionFinding

OK, BROKEN, ABSENT = "[green]ok[/]", "[red]broken[/]", "[dim]not installed[/]"


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print everything found; what the config lacks comes last, where it is seen."""
    console.print(_plugin_table(diagnosis))
    for plugin in diagnosis.plugins:
        if plugin.error:
            title = f"{plugin.name} ({plugin.distribution})"
            console.print(Panel(escape(plugin.error.strip()), title=escape(title), border_style="red"))
    console.print(_implementation_table(diagnosis))
    console.print(_patch_table(diagnosis))
    console.print(_version_table(diagnosis.versions))
    if diagnosis.machine is not None:
        console.print(_machine_table(diagnosis.machine, diagnosis.environments))
    _show_verdict(diagnosis, console)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plugin_table(diagnosis: Diagnosis) -> Table:
    table = _table("Plugins", ["plugin", "distribution", "entry point", "state"])
    for plugin in diagnosis.plugins:
        table.add_row(plugin.name, plugin.distribution, plugin.target, BROKEN if plugin.error else OK)
    return table


def _implementation_table(diagnosis: Diagnosis) -> Table:
    table = _table("Registered implementations", ["kind", "name", "plugin", "what it does", "state"])
    kind = None
    for found in diagnosis.implementations:
        if found.kind != kind:
            table.add_section()
        state = f"[yellow]{escape(found.problem)}[/]" if found.problem else OK
        shown_kind = "" if found.kind == kind else found.kind.replace("_", " ")
        table.add_row(shown_kind, found.name, found.plugin, escape(found.summary), state)
        kind = found.kind
    return table


def _patch_table(diagnosis: Diagnosis) -> Table:
    table = _table("Patches of upstream", ["patch", "target", "holds for", "in this process", "state"])
    for patch in diagnosis.patches:
        requires = ", ".join(f"{host}{wanted}" for host, wanted in patch.requires.items())
        state = f"[red]{escape(patch.problem)}[/]" if patch.problem else OK
        table.add_row(patch.name, patch.target, requires, "applied" if patch.applied else "not applied", state)
    return table


def _version_table(versions: list[VersionFinding]) -> Table:
    table = _table("Hosts", ["distribution", "wanted", "found", "state"])
    for version in versions:
        state = f"[red]{escape(version.problem)}[/]" if version.problem else OK if version.found else ABSENT
        table.add_row(version.distribution, version.wanted or "any", version.found or "-", state)
    return table


def _machine_table(machine: MachineFinding, environments: dict[str, SimulatorStatus]) -> Table:
    table = _table("Machine", ["part", "found"])
    table.add_row("Python", machine.python)
    table.add_row("system", machine.system)
    table.add_row("CPU", f"{machine.cpu}, {machine.num_cores} cores usable, {machine.memory_gib} GiB memory")
    table.add_row("GPU", "\n".join(machine.gpus) or f"none: {escape(machine.gpu_problem or 'no device')}")
    for backend, problem in machine.rendering.items():
        table.add_row(f"rendering, {backend}", f"[yellow]{escape(problem)}[/]" if problem else OK)
    table.add_row("EGL devices", escape(machine.egl_devices))
    for name, status in environments.items():
        state = f"[yellow]{escape(status.problem)}[/]" if status.problem else OK
        table.add_row(name, f"{escape(status.found)} {state}".strip())
    return table


def _show_verdict(diagnosis: Diagnosis, console: Console) -> None:
    config = " ".join(diagnosis.overrides) or "the default config"
    if not diagnosis.needs:
        console.print(f"[green]Everything that {escape(config)} needs is here.[/]")
        return
    console.print(f"[red bold]{len(diagnosis.needs)} fault(s) stop {escape(config)}:[/]")
    for number, need in enumerate(diagnosis.needs, start=1):
        console.print(f"  {number}. {escape(need)}")
