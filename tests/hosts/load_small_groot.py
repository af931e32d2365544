# SPDX-License-Identifier: Apache-2.0
"""Load a GR00T-N1.5 checkpoint and predict actions where embodix is not installed.

LeRobot 0.5.1 as released can't build any GR00T-N1.5 with the transformers it is pinned to. The four faults that stop
it are shimmed here, each in the smallest way; what loads the checkpoint and its processors is upstream alone.

usage: load_small_groot.py <checkpoint> <file of a raw batch> <file for the actions>
"""

import importlib.util
import sys

import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.groot import groot_n1, processor_groot
from lerobot.policies.groot.action_head import flow_matching_action_head
from lerobot.policies.groot.modeling_groot import GrootPolicy
from transformers.models.siglip import modeling_siglip


def shim() -> None:
    """Beta() on the meta device, no post_init, flash-attn demanded, lists for tensors from the image processor."""
    beta, init = flow_matching_action_head.Beta, groot_n1.GR00TN15.__init__
    siglip, auto_processor = modeling_siglip.SiglipVisionModel.__init__, processor_groot.AutoProcessor

    def beta_on_cpu(*concentrations):
        with torch.device("cpu"):
            return beta(*concentrations)

    def init_to_the_end(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.post_init()

    def siglip_with_sdpa(self, config):
        config._attn_implementation = "sdpa"
        siglip(self, config)

    class TensorProcessor:
        @staticmethod
        def from_pretrained(*args, **kwargs):
            processor = auto_processor.from_pretrained(*args, **kwargs)
            image_class = type(processor.image_processor)
            preprocess = image_class.preprocess
            image_class.preprocess = lambda self, images, **kw: preprocess(
                self, images, **{**kw, "return_tensors": "pt"}
            )
            return processor

    flow_matching_action_head.Beta = beta_on_cpu
    groot_n1.GR00TN15.__init__ = init_to_the_end
    modeling_siglip.SiglipVisionModel.__init__ = siglip_with_sdpa
    processor_groot.AutoProcessor = TensorProcessor


if __name__ == "__main__":
    found = importlib.util.find_spec("embodix")  # at most the data folders of an editable install, no package
    assert found is None or found.origin is None, "embodix must not be installed here"
    checkpoint, batch_file, actions_file = sys.argv[1:]
    shim()
    policy = GrootPolicy.from_pretrained(checkpoint)
    preprocess, postprocess = make_pre_post_processors(policy.config, pretrained_path=checkpoint)
    batch = preprocess(torch.load(batch_file))
    torch.manual_seed(0)
    actions = policy.predict_action_chunk(batch)
    torch.save({"actions": actions, "first": postprocess(actions[:, 0])}, actions_file)
    assert not [name for name in sys.modules if name.split(".")[0] == "embodix"]
