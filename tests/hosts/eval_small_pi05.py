# SPDX-License-Identifier: Apache-2.0
"""``lerobot-eval`` where embodix is not installed, with upstream's π0.5 made as small as a JSON file says.

The smallest π0.5 that upstream itself can run has 4.1 billion parameters (its vision projector is always 2048 wide,
which only gemma_2b fits). Only the sizes and the length of an episode are set here; what loads the checkpoint and
rolls it out is upstream alone.

usage: eval_small_pi05.py <architecture.json> <arguments of lerobot-eval...>
"""

import importlib.util
import json
import sys
from pathlib import Path

from lerobot.policies.pi05 import modeling_pi05
from lerobot.scripts import lerobot_eval
from metaworld.sawyer_xyz_env import SawyerXYZEnv

EPISODE_STEPS = 12  # upstream offers no option for it: --env.episode_length is not passed to MetaWorld


def shrink(sizes: dict) -> None:
    """Put a small model in the place of the two sizes upstream knows."""
    language = {key: value for key, value in sizes["language"].items() if key != "vocab_size"}
    configs = {"gemma_2b": language, "gemma_300m": sizes["action_expert"]}
    vlm, expert = modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma, modeling_pi05.PiGemmaForCausalLM
    vocab_size = sizes["language"]["vocab_size"]

    def small_vlm(config):
        for key, value in sizes["vision"].items():
            setattr(config.vision_config, key, value)
        config.vision_config.projection_dim = language["width"]
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = vocab_size
        return vlm(config=config)

    def small_expert(config):
        config.vocab_size = vocab_size
        return expert(config=config)

    modeling_pi05.get_gemma_config = lambda variant: modeling_pi05.GemmaConfig(**configs[variant])
    modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma = small_vlm
    modeling_pi05.PiGemmaForCausalLM = small_expert


if __name__ == "__main__":
    found = importlib.util.find_spec("embodix")  # at most the data folders of an editable install, no package
    assert found is None or found.origin is None, "embodix must not be installed here"
    SawyerXYZEnv.max_path_length = EPISODE_STEPS
    shrink(json.loads(Path(sys.argv[1]).read_text()))
    sys.argv = ["lerobot-eval", *sys.argv[2:]]
    lerobot_eval.main()
    assert not [name for name in sys.modules if name.split(".")[0] == "embodix"]
