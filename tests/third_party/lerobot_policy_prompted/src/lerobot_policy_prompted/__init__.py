# SPDX-License-Identifier: Apache-2.0
"""A small flow-matching policy with prompts and cameras."""

from lerobot_policy_prompted.configuration_prompted import PromptedConfig

__all__ = ["PromptedConfig"]
