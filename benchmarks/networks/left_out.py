"""Networks of the packages that the survey leaves out, with the reason."""

from __future__ import annotations

from benchmarks.networks.segmentation_decoders import REFUSED_PAIRS
from benchmarks.networks.torchvision_builders import TOO_LARGE

_PAIRS = ", ".join(f"{decoder} with {encoder}" for encoder, each in REFUSED_PAIRS.items() for decoder in sorted(each))

LEFT_OUT = {
    f"torchvision: {', '.join(TOO_LARGE)}": "more and wider blocks of listed ones, too many weights for float64 here",
    "torchvision: detection, raft, quantized": "lists of images, two images, and integers instead of floating point",
    "timm: further sizes of listed families, and deepseek_vit, gemma4_vit": "the same blocks, or too many weights",
    f"smp: {_PAIRS}": "refused by the package itself; DPT takes encoders of tokens alone",
    "monai: GlobalNet, VQVAE": "they compute in float32 inside and fail by themselves in float64",
    "monai: MaskedAutoEncoderViT": "it masks tokens at random, and torch's random numbers are others than ours",
    "monai: HyenaNDUNETR": "it needs a package that is not among those installed here, nvsubquadratic",
    "monai: ControlNet, DiffusionModelUNet, NaViT, SPADE*, Transchex, VISTA3D, VoxelMorph": "several inputs, or lists",
    "monai: other depths of DenseNet, EfficientNet, ResNet, SENet, MedNeXt": "the same blocks",
}


def left_out() -> list[str]:
    """A line a reason."""
    return [f"- {names}: {reason}." for names, reason in LEFT_OUT.items()]
