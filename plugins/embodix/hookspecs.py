# SPDX-License-Identifier: Apache-2.0
"""Every extension point of embodix, one sentence each.

A plugin is a module (or object) published under the entry-point group ``embodix`` whose functions carry the
``embodix.hookimpl`` marker. Each hook returns a list of :class:`Registration`; the registered attribute is
imported when it is first needed, so that a plugin may be listed where its heavy dependencies are missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

PROJECT_NAME = "embodix"
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True)
class Registration:
    """A named implementation.

    Attributes:
        name: what the Hydra group's ``name`` field selects.
        target: ``package.module:attribute``, imported on first use.
        summary: one line for ``embodix doctor`` and the documentation.
    """

    name: str
    target: str
    summary: str


class EmbodixSpec:
    """The hook specifications, one hook a kind of implementation."""

    @hookspec
    def register_packers(self) -> list[Registration]:
        """Name the packers: which prefix tokens of a batch are computed, and possibly which samples share a batch."""
        raise NotImplementedError

    @hookspec
    def register_attention_backends(self) -> list[Registration]:
        """Name the variable-length attention backends: packed q, k, v with segment boundaries in, outputs out."""
        raise NotImplementedError

    @hookspec
    def register_policies(self) -> list[Registration]:
        """Name the policies by the host's policy type: a ``PolicySupport``, all that embodix knows of one."""
        raise NotImplementedError

    @hookspec
    def register_quantizers(self) -> list[Registration]:
        """Name the quantizers: they convert chosen linear layers of a policy to a low-precision format."""
        raise NotImplementedError

    @hookspec
    def register_precisions(self) -> list[Registration]:
        """Name the training precisions: they run the matrix products of chosen linear layers in a low-precision format,
        with high-precision master weights."""
        raise NotImplementedError

    @hookspec
    def register_parallel_strategies(self) -> list[Registration]:
        """Name the parallel strategies: they spread a policy, its optimizer and a training step over processes."""
        raise NotImplementedError

    @hookspec
    def register_runners(self) -> list[Registration]:
        """Name the runners: they schedule rollout, training and weight exchange."""
        raise NotImplementedError

    @hookspec
    def register_environments(self) -> list[Registration]:
        """Name the environments: a LeRobot ``EnvConfig`` subclass by the type it registers."""
        raise NotImplementedError

    @hookspec
    def register_data_sources(self) -> list[Registration]:
        """Name the data sources: recorders that write a LeRobotDataset."""
        raise NotImplementedError

    @hookspec
    def register_host_patches(self) -> list[Registration]:
        """Name the patches of upstream, by their modules: a ``PATCH`` record beside a function ``apply``."""
        raise NotImplementedError

    @hookspec
    def register_verbs(self) -> list[Registration]:
        """Name the verbs of the command line: a function of the arguments that returns the exit code."""
        raise NotImplementedError

    @hookspec
    def register_schemas(self) -> list[Registration]:
        """Name the schemas of configs: a function that stores dataclasses in Hydra's ``ConfigStore``."""
        raise NotImplementedError

    @hookspec
    def register_config_packages(self) -> list[Registration]:
        """Name the packages whose YAML files are config groups, on Hydra's search path: ``<package>:__name__``."""
        raise NotImplementedError


def hook_names() -> list[str]:
    """Names of all hooks, in the order of this file."""
    return [name for name in vars(EmbodixSpec) if name.startswith("register_")]
