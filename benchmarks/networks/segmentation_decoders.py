"""segmentation-models-pytorch: every decoder with six encoders, unless the package itself refuses the pair."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.networks.factories import IMAGE, Published, Shape, called

_DECODERS = (
    "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet",
    "Segformer",
)  # fmt: skip
_ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "timm-regnetx_002", "densenet121", "mit_b0")
REFUSED_PAIRS = {
    "densenet121": {"PAN", "DeepLabV3", "DeepLabV3Plus"},
    "mit_b0": {"UnetPlusPlus", "Linknet", "PAN", "DeepLabV3", "DeepLabV3Plus"},
}
"""By encoder: the decoders that the package refuses to put behind it."""
_OF_TOKENS = ("tu-vit_tiny_patch16_224", "tu-deit_tiny_patch16_224", "tu-vit_small_patch16_224")
"""Encoders for DPT, which takes no others."""


def segmentation_models() -> Iterator[Published]:
    """All of them."""
    for encoder in _ENCODERS:
        for decoder in _DECODERS:
            if decoder not in REFUSED_PAIRS.get(encoder, ()):
                yield _joined(decoder, encoder, (2, 3, 128, 128) if decoder == "PAN" else IMAGE)
    for encoder in _OF_TOKENS:
        yield _joined("DPT", encoder, (2, 3, 224, 224))


def _joined(decoder: str, encoder: str, shape: Shape) -> Published:
    build = called("segmentation_models_pytorch", decoder, encoder_name=encoder, encoder_weights=None, classes=2)
    name = decoder if encoder == _ENCODERS[0] else f"{decoder}.{encoder}"
    return Published(f"smp.{name}", build, shape)
