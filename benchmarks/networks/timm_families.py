"""timm's architectures: a small one of every family, at the smallest input that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.networks.factories import IMAGE, Published, Shape, called

_AT_64 = """
    resnet18 resnetv2_50 seresnet18 ecaresnet26t skresnet18 res2net50_26w_4s resnest14d dla34 hrnet_w18_small vovnet39a
    efficientnet_b0 mobilenetv3_small_050 mixnet_s ghostnet_050 regnetx_002 repvgg_a0 nfnet_f0 convnext_atto
    convnextv2_atto cspresnet50 darknet53 xception41 edgenext_xx_small poolformer_s12 mobilevit_xxs efficientvit_b0
    mambaout_femto fastvit_t8 inception_next_tiny
    crossvit_tiny_240 cpubone_nano davit_tiny efficientvim_m1_dist fasternet_t0 focalnet_tiny_lrf hieradet_small
    iformer_s lowformer_b0 nextvit_small pvt_v2_b0 rdnet_tiny repghostnet_050 eca_resnext26ts
    gcresnext26ts gernet_s mobileone_s0 repvgg_b0 seresnext26ts cs3darknet_s darknet17 sedarknet21 densenetblur121d
    dpn68 fbnetc_100 mnasnet_050 mobilenet_edgetpu_v2_xs mobilenetv2_050 semnasnet_050 spnasnet_100 tinynet_a
    tf_efficientnet_b0 ghostnetv3_050 hardcorenas_a hgnet_tiny hgnetv2_b0 inception_next_atto lcnet_050 lcnetv2_small
    fbnetv3_b tf_mobilenetv3_small_minimal_100 poolformerv2_s12 eca_nfnet_l0 nf_regnet_b0 regnetv_040 regnetz_005
    repvit_m0_9 resnest26d ecaresnetlight ecaresnext26t_32x4d resnetaa50 resnetblur18 resnetrs50 resnetv2_18
    rexnet_100 selecsls42 shvit_s1 skresnext50_32x4d starnet_s050 tresnet_m ese_vovnet19b_slim legacy_xception
    test_byobnet test_convnext test_efficientnet test_mambaout test_nfnet test_resnet gc_efficientnetv2_rw_t
    efficientnetv2_rw_t mobilenetv4_conv_small_050 swiftformer_xs test_vit test_vit2 test_vit4 test_efficientnet_gn
    test_efficientnet_ln test_efficientnet_evos test_convnext2 legacy_seresnet18 legacy_seresnext26_32x4d vgg11_bn
    ghostnetv2_100 convnext_atto_ols convnext_atto_rms resnetv2_18d resnetv2_50d_gn resnetv2_50d_evos resnetv2_50d_frn
    efficientnet_b0_gn efficientnet_b0_g16_evos nf_resnet26 cs3sedarknet_l cs3darknet_focus_s dla46_c dla46x_c
    res2next50 resnet10t resnet26d regnety_002 sequencer2d_s lambda_resnet26t twins_pcpvt_small twins_svt_small
    pvt_v2_b2_li ese_vovnet39b_evos mobilenetv4_hybrid_medium nasnetalarge pnasnet5large mobilenetv5_base
    xcit_nano_12_p16_224 efficientvit_l1 tiny_vit_5m_224 resnet50_gn seresnet33ts fastvit_sa12 fastvit_mci0
""".split()  # noqa: SIM905 - a list of words reads better
"""At 64×64."""

_SIZED = """
    vit_tiny_patch16_224
    cait_xxs24_224 coat_tiny convit_tiny convmixer_1024_20_ks9_p14 csatv2 deit_tiny_patch16_224 efficientformerv2_s0
    efficientvit_m0 eva02_tiny_patch14_224 gcvit_tiny hiera_tiny_224 levit_128 coatnext_nano_rw_224
    maxxvit_rmlp_nano_rw_256 caformer_s18 convformer_s18 gmixer_12_224 gmlp_s16_224 resmlp_12_224 mobilevitv2_050
    mvitv2_tiny nest_tiny pit_xs_224 beit_base_patch16_224 tnt_s_patch16_224 vit_small_r26_s32_224
    vit_relpos_small_patch16_224 vit_srelpos_small_patch16_224 samvit_base_patch16_224 vitamin_small_224 volo_d1_224
    swinv2_tiny_window8_256 swinv2_cr_tiny_224 levit_conv_128s deit3_small_patch16_224 vit_tiny_r_s16_p8_224
    swin_s3_tiny_224 coat_lite_tiny coatnet_nano_cc_224 maxvit_rmlp_pico_rw_256 botnet26t_256 eca_botnext26ts_256
    lambda_resnet26rpt_256 naflexvit_base_patch16_gap visformer_tiny qwen3_vit_88m vit_wee_patch16_reg1_gap_256
    coatnet_pico_rw_224 swin_tiny_patch4_window7_224 maxvit_pico_rw_256 mixer_s32_224
""".split()  # noqa: SIM905
"""Built for 64×64 with `img_size`."""

_LARGER = {
    "bat_resnext26ts": 256, "halonet26t": 256, "eca_halonext26ts": 256, "inception_resnet_v2": 96, "inception_v3": 96,
    "inception_v4": 96, "efficientformer_l1": 224, "test_vit3": 160,
}  # fmt: skip
"""The smallest squares that they take, where those are larger."""


def timm_networks() -> Iterator[Published]:
    """All of them."""
    for name in _AT_64:
        yield _timm(name, IMAGE)
    for name in _SIZED:
        yield _timm(name, IMAGE, img_size=64)
    for name, extent in _LARGER.items():
        yield _timm(name, (2, 3, extent, extent))


def _timm(name: str, shape: Shape, **options: Any) -> Published:
    build = called("timm", "create_model", model_name=name, pretrained=False, num_classes=10, **options)
    return Published(f"timm.{name}", build, shape)
