# SPDX-License-Identifier: Apache-2.0
"""The record of a policy by its type, and which policies offer what. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from embodix import plugins
from embodix.contracts import NotOfferedError, PolicySupport

KIND = "policies"
POLICY_GUARDS = "policy_guards"  # stands in the config's patches for those of the policy's record


@functools.cache
def support_of(policy_type: str) -> PolicySupport:
    """The registered record of a policy, or one that leaves everything to upstream.

    Raises:
        embodix.plugins.PluginError: it is registered and can't be imported, or is no record.
    """
    if policy_type not in plugins.registry().names(KIND):
        return PolicySupport(policy_type)
    try:
        support = plugins.resolve(KIND, policy_type)()
    except TypeError as error:
        raise plugins.PluginError(_no_record(policy_type, error)) from error
    if not isinstance(support, PolicySupport):
        raise plugins.PluginError(_no_record(policy_type, f"it gives {support!r}"))
    return support


def _no_record(policy_type: str, why: object) -> str:
    registration, provider = plugins.registry().registration(KIND, policy_type), plugins.registry().providers
    return (
        f"policy {policy_type!r} of plugin {provider[KIND, policy_type]!r} must be registered as a subclass of "
        f"embodix.contracts.PolicySupport that takes no arguments; {registration.target} is none: {why}."
    )


def types_offering(member: str) -> list[str]:
    """Types of the registered policies that offer an attribute or method, those that can't be imported left out."""
    return [name for name in plugins.registry().names(KIND) if _offers(name, member)]


def _offers(policy_type: str, member: str) -> bool:
    try:
        return support_of(policy_type).offers(member)
    except plugins.PluginError:
        return False


def with_guards(patches: Mapping[str, Any], policy_type: str) -> dict[str, Any]:
    """A config's patches with the guards of the policy's record in the place of ``policy_guards``."""
    guards = support_of(policy_type).guards if POLICY_GUARDS in patches else ()
    chosen = {**dict.fromkeys(guards), **patches}
    return {name: options for name, options in chosen.items() if name != POLICY_GUARDS}


def require_offered(policy_type: str, member: str, what: str, remedy: str) -> PolicySupport:
    """The record of a policy that offers an attribute or method.

    Args:
        what: "X takes", before the list of policies that do.
        remedy: what to do instead.

    Raises:
        NotOfferedError: it does not; the message lists the policies that do.
    """
    support = support_of(policy_type)
    if not support.offers(member):
        known = " and ".join(types_offering(member)) or "no policy that is installed"
        raise NotOfferedError(f"{what} {known}; got policy.type={policy_type}. {remedy}")
    return support


def sizes_patch(policy_type: str) -> str:
    """The patch that builds a policy in the sizes of ``architecture``.

    Raises:
        NotOfferedError: a policy whose sizes can't be chosen.
    """
    remedy = "Leave it null and set that policy's own fields."
    support = require_offered(policy_type, "sizes_patch", "`architecture` gives sizes to", remedy)
    assert support.sizes_patch is not None
    return support.sizes_patch
